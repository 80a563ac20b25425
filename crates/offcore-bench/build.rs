//! Builds the C part of the `dpdk-lib` peer if the feature `dpdk` is enabled. Otherwise does nothing.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    #[cfg(feature = "dpdk")]
    dpdk_peer();
}

#[cfg(feature = "dpdk")]
fn dpdk_peer() {
    for file in ["peer/dpdk_peer.c", "peer/dpdk_peer.h"] {
        println!("cargo:rerun-if-changed={file}");
    }
    // Results of offcore-dpdk's build script about the library.
    let found = |what: &str| std::env::var(format!("DEP_OFFCORE_DPDK_{what}"));
    let expected = |what: &str| found(what).expect("offcore-dpdk is built with DPDK");

    let mut build = cc::Build::new();
    build
        .file("peer/dpdk_peer.c")
        .includes(expected("INCLUDE").split(':'))
        .std("gnu11")
        .flag("-include")
        .flag("rte_config.h");
    // The peer is a reference, so it is built in the same way in every profile, for the instruction set of the library
    // itself.
    build.opt_level(3);
    expected("FLAGS").split_whitespace().for_each(|flag| {
        build.flag(flag);
    });
    build.compile("dpdk_peer");

    println!("cargo:rustc-link-lib=dylib=rte_vhost");
    println!("cargo:rustc-env=OFFCORE_DPDK_LIBDIR={}", expected("LIBDIR"));
    if let Ok(rpath) = found("RPATH") {
        println!("cargo:rustc-link-arg={rpath}");
    }
}
