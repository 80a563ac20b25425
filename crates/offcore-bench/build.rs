//! Builds the C side of the `dpdk-lib` peer when the feature `dpdk` asks for it, and does nothing otherwise.

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
    let dpdk = match pkg_config::Config::new().cargo_metadata(false).atleast_version("22.11").probe("libdpdk")
    {
        Ok(dpdk) => dpdk,
        Err(error) => {
            eprintln!(
                "feature `dpdk` of offcore-bench needs libdpdk 22.11 or later with its headers (Debian 12: apt-get install \
                 libdpdk-dev pkg-config), or build without the feature: {error}"
            );
            std::process::exit(1);
        }
    };

    let mut build = cc::Build::new();
    build
        .file("peer/dpdk_peer.c")
        .includes(&dpdk.include_paths)
        .std("gnu11")
        .flag("-include")
        .flag("rte_config.h");
    // The peer is a yardstick: built the same in every profile, for the instruction set its headers ask for.
    build.opt_level(3);
    if std::env::var("CARGO_CFG_TARGET_ARCH").as_deref() == Ok("x86_64") {
        build.flag("-march=corei7");
    }
    build.compile("dpdk_peer");

    // By hand: the list of pkg-config names every DPDK library, and loads as many.
    for path in &dpdk.link_paths {
        println!("cargo:rustc-link-search=native={}", path.display());
    }
    for library in ["rte_vhost", "rte_mbuf", "rte_mempool", "rte_eal"] {
        println!("cargo:rustc-link-lib=dylib={library}");
    }
}
