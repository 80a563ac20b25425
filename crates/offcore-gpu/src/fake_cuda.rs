//! Path of a replacement of the CUDA driver's library (`tests/fake_cuda`), for tests.

/// The library. `libcuda.so.1` is in the same directory, for processes with `LD_LIBRARY_PATH`. A process that has
/// loaded this path finds it as `libcuda.so`. `None` if there was no C++ compiler.
pub const FAKE_CUDA: Option<&str> = option_env!("OFFCORE_FAKE_CUDA");
