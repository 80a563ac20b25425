//! `cuda:N` as a copy engine, on a stand-in for the CUDA driver's library (`tests/fake_cuda`): the engine conformance suite,
//! one test for each check, and what is special about this engine. Where no C++ compiler was there, nothing can be tested.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[cfg(host_kernels)]
mod arena;
#[cfg(host_kernels)]
mod engine;
#[cfg(host_kernels)]
#[path = "../cuda/rig.rs"]
mod rig;

#[cfg(not(host_kernels))]
#[test]
fn the_copy_engine_on_a_stand_in() {
    println!(
        "SKIP: the_copy_engine_on_a_stand_in: no C++ compiler was there when offcore-gpu was built (install g++)"
    );
    assert_ne!(std::env::var("CI").as_deref(), Ok("true"), "CI has a C++ compiler");
}
