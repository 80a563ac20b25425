//! Tells the binary where a DPDK of one's own is, when the feature `dpdk` asks for DPDK, and does nothing otherwise.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    // From offcore-dpdk's build script.
    if let Ok(rpath) = std::env::var("DEP_OFFCORE_DPDK_RPATH") {
        println!("cargo:rustc-link-arg={rpath}");
    }
}
