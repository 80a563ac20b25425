//! The kernels on threads of the host, against independent implementations. Without a C++ compiler nothing can be
//! tested.

#[cfg(host_kernels)]
mod bodies;
#[cfg(host_kernels)]
mod parts;
#[cfg(host_kernels)]
mod pitfalls;
#[cfg(host_kernels)]
mod rig;
#[cfg(host_kernels)]
mod staging;
#[cfg(host_kernels)]
mod work;

#[cfg(not(host_kernels))]
#[test]
fn kernels_on_the_host() {
    println!("SKIP: kernels_on_the_host: no C++ compiler was there when offcore-gpu was built (install g++)");
    assert_ne!(std::env::var("CI").as_deref(), Ok("true"), "CI has a C++ compiler");
}
