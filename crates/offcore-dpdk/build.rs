//! Builds the C side when the feature `dpdk` asks for it, and does nothing otherwise.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    #[cfg(feature = "dpdk")]
    shim();
}

#[cfg(feature = "dpdk")]
fn shim() {
    const FILES: [&str; 4] = ["shim/eal.c", "shim/pool.c", "shim/eth.c", "shim/dma.c"];
    for file in FILES.iter().chain(&["shim/shim.h"]) {
        println!("cargo:rerun-if-changed={file}");
    }
    let dpdk = match pkg_config::Config::new().cargo_metadata(false).atleast_version("22.11").probe("libdpdk")
    {
        Ok(dpdk) => dpdk,
        Err(error) => {
            eprintln!(
                "feature `dpdk` needs libdpdk 22.11 or later with its headers (Debian 12: apt-get install libdpdk-dev \
                 pkg-config), or build without the feature: {error}"
            );
            std::process::exit(1);
        }
    };

    let mut build = cc::Build::new();
    build.files(FILES).includes(&dpdk.include_paths).std("gnu11").flag("-include").flag("rte_config.h");
    // Per-packet code of DPDK is in its headers: fast in every profile, for the instruction set that they ask for.
    build.opt_level(3).define("ALLOW_EXPERIMENTAL_API", None);
    if std::env::var("CARGO_CFG_TARGET_ARCH").as_deref() == Ok("x86_64") {
        build.flag("-march=corei7");
    }
    build.compile("offcore_dpdk");

    // By hand: the list of pkg-config names every DPDK library, and loads as many. Drivers are loaded by the EAL.
    for path in &dpdk.link_paths {
        println!("cargo:rustc-link-search=native={}", path.display());
    }
    for library in ["rte_dmadev", "rte_ethdev", "rte_mbuf", "rte_mempool", "rte_eal"] {
        println!("cargo:rustc-link-lib=dylib={library}");
    }
}
