//! Builds the kernels' source for the host (`kernels/host.cpp`), and does without where there is no C++ compiler.

use std::process::{Command, Stdio};

fn main() {
    println!("cargo::rustc-check-cfg=cfg(host_kernels)");
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=kernels");

    if let Err(compiler) = compiler_runs() {
        println!(
            "cargo::warning=no C++ compiler ({compiler} does not run), so `--device host` will be absent from \
             offcore gpu; to have it, install g++ (Debian: apt-get install g++) or set CXX, then \
             `cargo clean -p offcore-gpu` and build again"
        );
        return;
    }
    cc::Build::new()
        .cpp(true)
        .std("c++17")
        .file("kernels/host.cpp")
        // Per-packet code: fast in every profile.
        .opt_level(3)
        .warnings(true)
        .extra_warnings(true)
        .flag_if_supported("-fno-exceptions")
        .flag_if_supported("-fno-rtti")
        // Nothing of C++'s library is used, so nothing of it has to be there when the program runs.
        .cpp_link_stdlib(None)
        .compile("offcore_gpu_host");
    println!("cargo::rustc-cfg=host_kernels");
}

/// Runs the C++ compiler that would be used, which has a name whether it is there or not. Its name, when it does not run.
fn compiler_runs() -> Result<(), String> {
    let tool = cc::Build::new().cpp(true).cargo_warnings(false).try_get_compiler().map_err(|_| "c++")?;
    let mut version = Command::new(tool.path());
    version.arg("--version").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    match version.status() {
        Ok(status) if status.success() => Ok(()),
        _ => Err(tool.path().display().to_string()),
    }
}
