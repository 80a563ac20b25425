//! CUDA devices on a fake driver library (`tests/fake_cuda`). The results do not prove anything about a real GPU.
//! Without a C++ compiler nothing can be tested.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[cfg(host_kernels)]
mod direct;
#[cfg(host_kernels)]
mod driver;
#[cfg(host_kernels)]
mod faults;
#[cfg(host_kernels)]
mod packets;
#[cfg(host_kernels)]
mod pipelines;
#[cfg(host_kernels)]
mod pitfalls;
#[cfg(host_kernels)]
mod processes;
#[cfg(host_kernels)]
mod rig;

#[cfg(not(host_kernels))]
#[test]
fn cuda_on_a_stand_in() {
    println!("SKIP: cuda_on_a_stand_in: no C++ compiler was there when offcore-gpu was built (install g++)");
    assert_ne!(std::env::var("CI").as_deref(), Ok("true"), "CI has a C++ compiler");
}
