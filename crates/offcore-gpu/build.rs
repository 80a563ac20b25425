//! Builds the kernels for the host (`kernels/host.cpp`) unless no C++ compiler is installed. For tests (feature
//! `test-switches`) it also builds a replacement of the CUDA driver's library.

use std::error::Error;
use std::ffi::OsString;
use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rustc-check-cfg=cfg(host_kernels)");
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=kernels");

    if let Err(compiler) = compiler_runs() {
        println!(
            "cargo::warning=no C++ compiler ({compiler} does not run), so `--device host` will be absent from \
             offcore gpu; to have it, install g++ (Debian: apt-get install g++) or set CXX, then \
             `cargo clean -p offcore-gpu` and build again"
        );
        return Ok(());
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
        // The C++ library is not used, so it need not be installed at run time.
        .cpp_link_stdlib(None)
        .compile("offcore_gpu_host");
    println!("cargo::rustc-cfg=host_kernels");
    if std::env::var_os("CARGO_FEATURE_TEST_SWITCHES").is_some() {
        fake_cuda()?;
    }
    Ok(())
}

/// Builds `tests/fake_cuda` as a shared library with the CUDA driver's name in a separate directory, and exports its
/// path.
fn fake_cuda() -> Result<(), Box<dyn Error>> {
    const SOURCES: &str = "tests/fake_cuda";
    println!("cargo::rerun-if-changed={SOURCES}");
    let folder = PathBuf::from(std::env::var_os("OUT_DIR").ok_or("OUT_DIR is not set")?).join("fake_cuda");
    fs::create_dir_all(&folder)?;
    let library = folder.join("libcuda.so");
    let mut sources: Vec<PathBuf> =
        fs::read_dir(SOURCES)?.map(|entry| Ok(entry?.path())).collect::<Result<_, std::io::Error>>()?;
    sources.retain(|path| path.extension().is_some_and(|extension| extension == "cpp"));
    sources.sort();
    let mut compiler = cc::Build::new().cpp(true).cargo_warnings(false).try_get_compiler()?.to_command();
    // A program that has loaded it by path then finds it by this name, the first that cudarc tries. It stays loaded,
    // because its threads may still run.
    compiler.args(["-shared", "-Wl,-soname,libcuda.so", "-Wl,-z,nodelete", "-Wl,-z,defs", "-pthread"]);
    compiler.args(["-std=c++17", "-O1", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Ikernels"]);
    compiler.args(&sources).arg("-o").arg(&library);
    let output = compiler.output()?;
    if !output.status.success() {
        let command: Vec<OsString> = compiler.get_args().map(Into::into).collect();
        let said = String::from_utf8_lossy(&output.stderr);
        return Err(format!("{SOURCES} does not compile ({command:?}): {said}").into());
    }
    for line in String::from_utf8_lossy(&output.stderr).lines() {
        println!("cargo::warning={line}");
    }
    fs::copy(&library, folder.join("libcuda.so.1"))?;
    println!("cargo::rustc-env=OFFCORE_FAKE_CUDA={}", library.display());
    Ok(())
}

/// Runs the configured C++ compiler, which may not exist. Returns its name if it does not run.
fn compiler_runs() -> Result<(), String> {
    let tool = cc::Build::new().cpp(true).cargo_warnings(false).try_get_compiler().map_err(|_| "c++")?;
    let mut version = Command::new(tool.path());
    version.arg("--version").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    match version.status() {
        Ok(status) if status.success() => Ok(()),
        _ => Err(tool.path().display().to_string()),
    }
}
