//! The CUDA driver's library, libcuda: loaded on first use, and checked for the required functions.

use std::sync::OnceLock;

use cudarc::driver::sys;

/// Returns whether the library is installed.
pub(crate) fn is_present() -> bool {
    static PRESENT: OnceLock<bool> = OnceLock::new();
    // SAFETY: loads a library and runs its initialisers. It is the driver's, which is trusted like its kernel module.
    *PRESENT.get_or_init(|| unsafe { sys::is_culib_present() })
}

/// Checks that the library is installed and has the functions that all drivers have.
///
/// # Errors
/// The remedy.
pub(crate) fn load() -> Result<(), String> {
    if !is_present() {
        return Err("no CUDA driver was found (libcuda.so): install NVIDIA's driver for this kernel, or give its library's \
                    directory in LD_LIBRARY_PATH"
            .into());
    }
    complete(EARLY, has)
}

/// Checks that the library has all functions that an open device calls: a missing function would end the program.
///
/// # Errors
/// The missing function.
pub(crate) fn is_complete() -> Result<(), String> {
    complete(CALLS, has)
}

fn complete(calls: &[&str], has: impl Fn(&str) -> bool) -> Result<(), String> {
    match calls.iter().find(|name| !has(name)) {
        None => Ok(()),
        Some(name) => Err(format!(
            "libcuda.so has no {name}: expected the library of NVIDIA's driver, 525.60.13 or later; see LD_LIBRARY_PATH and \
             ldconfig -p for another one of that name"
        )),
    }
}

fn has(name: &str) -> bool {
    // SAFETY: the library is loaded; the address is not used.
    unsafe { sys::culib().get::<unsafe extern "C" fn()>(name.as_bytes()) }.is_ok()
}

/// Functions that all drivers have, and that are also called with old drivers.
const EARLY: &[&str] = &[
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDeviceGetCount",
    "cuDeviceGetName",
    "cuDeviceGetPCIBusId",
    "cuDeviceTotalMem_v2",
    "cuDriverGetVersion",
    "cuGetErrorName",
    "cuGetErrorString",
    "cuInit",
];

/// All other called functions. CUDA 12.0 has them.
const CALLS: &[&str] = &[
    "cuCtxSetCurrent",
    "cuDevicePrimaryCtxRelease_v2",
    "cuDevicePrimaryCtxRetain",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventQuery",
    "cuEventRecord",
    "cuFlushGPUDirectRDMAWrites",
    "cuFuncGetAttribute",
    "cuGraphAddKernelNode_v2",
    "cuGraphCreate",
    "cuGraphDestroy",
    "cuGraphExecDestroy",
    "cuGraphInstantiateWithFlags",
    "cuGraphLaunch",
    "cuGraphUpload",
    "cuLaunchKernel",
    "cuMemAlloc_v2",
    "cuMemFree_v2",
    "cuMemGetHandleForAddressRange",
    "cuMemGetInfo_v2",
    "cuMemHostGetDevicePointer_v2",
    "cuMemHostRegister_v2",
    "cuMemHostUnregister",
    "cuMemcpyHtoD_v2",
    "cuMemsetD8_v2",
    "cuModuleGetFunction",
    "cuModuleLoadDataEx",
    "cuModuleUnload",
    "cuOccupancyMaxActiveBlocksPerMultiprocessor",
    "cuPointerSetAttribute",
    "cuProfilerStart",
    "cuProfilerStop",
    "cuStreamCreateWithPriority",
    "cuStreamDestroy_v2",
    "cuStreamQuery",
    "cuStreamSynchronize",
];

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::fs;
    use std::path::Path;

    use super::*;

    /// Collects the names behind `call!(` and `sys::` in the sources of a directory.
    fn called(dir: &Path, names: &mut BTreeSet<String>) {
        for entry in fs::read_dir(dir).unwrap().map(Result::unwrap) {
            if entry.path().is_dir() {
                called(&entry.path(), names);
                continue;
            }
            let text = fs::read_to_string(entry.path()).unwrap();
            let parts = ["call!(", "sys::"].into_iter().flat_map(|before| text.split(before).skip(1));
            let words =
                parts.map(|part| part.split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap());
            names.extend(words.filter(|name| name.starts_with("cu") && *name != "culib").map(str::to_owned));
        }
    }

    #[test]
    fn every_called_function_is_loaded() {
        let mut names = BTreeSet::new();
        called(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src/cuda"), &mut names);
        let listed: BTreeSet<String> = [EARLY, CALLS].concat().into_iter().map(str::to_owned).collect();
        assert_eq!(names, listed);
    }

    #[test]
    fn a_missing_function_is_named() {
        complete(CALLS, |_| true).unwrap();
        let text = complete(CALLS, |name| name != "cuGraphUpload").unwrap_err();
        assert!(text.contains("no cuGraphUpload:") && text.contains("525.60.13"), "{text}");
    }
}
