//! Builds the C shim if the feature `dpdk` is enabled, and does nothing otherwise.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    #[cfg(feature = "dpdk")]
    dpdk::shim();
}

#[cfg(feature = "dpdk")]
mod dpdk {
    use std::path::PathBuf;

    /// The instruction sets beyond SSE4.2 for which DPDK's headers contain code: the name in DPDK's configuration, and
    /// the compiler option that disables the set.
    const INSTRUCTION_SETS: [(&str, &str); 3] =
        [("AVX", "-mno-avx"), ("AVX2", "-mno-avx2"), ("AVX512F", "-mno-avx512f")];

    pub(super) fn shim() {
        const FILES: [&str; 4] = ["shim/eal.c", "shim/pool.c", "shim/eth.c", "shim/dma.c"];
        for file in FILES.iter().chain(&["shim/shim.h"]) {
            println!("cargo:rerun-if-changed={file}");
        }
        let mut config = pkg_config::Config::new();
        let dpdk = match config.cargo_metadata(false).atleast_version("22.11").probe("libdpdk") {
            Ok(dpdk) => dpdk,
            Err(error) => {
                eprintln!(
                    "feature `dpdk` needs libdpdk 22.11 or later with its headers (Debian 12: apt-get install \
                     libdpdk-dev pkg-config), or build without the feature: {error}"
                );
                std::process::exit(1);
            }
        };
        let flags = target_flags(&dpdk.include_paths);
        let libdir = pkg_config::get_variable("libdpdk", "libdir").expect("libdpdk.pc names its libdir");

        let mut build = cc::Build::new();
        build.files(FILES).includes(&dpdk.include_paths).std("gnu11").flag("-include").flag("rte_config.h");
        // Much of DPDK's per-packet code is in its headers, so it is optimized in every profile.
        build.opt_level(3).define("ALLOW_EXPERIMENTAL_API", None);
        flags.iter().for_each(|flag| {
            build.flag(flag);
        });
        build.compile("offcore_dpdk");

        // The libraries are listed explicitly, because pkg-config would link, and load, every DPDK library. The EAL
        // loads drivers.
        for path in &dpdk.link_paths {
            println!("cargo:rustc-link-search=native={}", path.display());
        }
        for library in ["rte_dmadev", "rte_ethdev", "rte_mbuf", "rte_mempool", "rte_eal"] {
            println!("cargo:rustc-link-lib=dylib={library}");
        }
        // For the build scripts of dependent crates.
        let include: Vec<_> = dpdk.include_paths.iter().map(|path| path.display().to_string()).collect();
        println!("cargo:include={}", include.join(":"));
        println!("cargo:flags={}", flags.join(" "));
        println!("cargo:libdir={libdir}");
        if !libdir.starts_with("/usr/lib") {
            // For a DPDK outside the system's directories, programs get an rpath to find the libraries.
            println!("cargo:rpath=-Wl,-rpath,{libdir}");
            println!("cargo:rustc-link-arg=-Wl,-rpath,{libdir}");
        }
    }

    /// Returns the compiler options that match the library's configuration, according to its headers. Instruction sets
    /// that the library was built without are disabled, because its `native` may refer to another machine.
    fn target_flags(include_paths: &[PathBuf]) -> Vec<String> {
        if std::env::var("CARGO_CFG_TARGET_ARCH").as_deref() != Ok("x86_64") {
            return Vec::new();
        }
        let mut config = include_paths.iter().map(|dir| dir.join("rte_build_config.h"));
        let config = config.find(|path| path.is_file()).expect("libdpdk has rte_build_config.h");
        println!("cargo:rerun-if-changed={}", config.display());
        let config = std::fs::read_to_string(&config).expect("rte_build_config.h can be read");
        let define = |name| {
            let mut lines = config.lines().filter_map(|line| line.strip_prefix("#define "));
            lines.find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')).map(str::trim)
        };
        let machine = define("RTE_MACHINE").expect("rte_build_config.h has RTE_MACHINE").trim_matches('"');
        let has = define("RTE_COMPILE_TIME_CPUFLAGS").unwrap_or_default();
        let has: Vec<_> =
            has.split(',').filter_map(|flag| flag.trim().strip_prefix("RTE_CPUFLAG_")).collect();
        let missing = INSTRUCTION_SETS.iter().filter(|(set, _)| !has.contains(set));
        std::iter::once(format!("-march={machine}")).chain(missing.map(|(_, off)| (*off).into())).collect()
    }
}
