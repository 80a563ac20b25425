//! Where tests find the stand-in for the CUDA driver's library (`tests/fake_cuda`).

/// The library; `libcuda.so.1` is beside it, so that a process finds it when `LD_LIBRARY_PATH` has its folder. A process that
/// has loaded it by this path finds it as `libcuda.so`. None where no C++ compiler was there.
pub const FAKE_CUDA: Option<&str> = option_env!("OFFCORE_FAKE_CUDA");
