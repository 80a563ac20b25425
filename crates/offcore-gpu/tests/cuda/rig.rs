//! The fake driver library, for one test at a time.

use std::ffi::{CStr, CString, c_char, c_int, c_longlong, c_ulonglong};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use libloading::Library;

/// The path of the library, which the build script has compiled. `libcuda.so.1` is in the same directory, for processes
/// with `LD_LIBRARY_PATH`. A process that has loaded this path finds it as `libcuda.so`. `None` if there was no C++
/// compiler.
pub(crate) const FAKE_CUDA: Option<&str> = option_env!("OFFCORE_FAKE_CUDA");

/// The fake driver in its initial state, for one test.
#[derive(Debug)]
pub(crate) struct Fake {
    library: &'static Library,
    _turn: MutexGuard<'static, ()>,
}

impl Fake {
    /// Waits until no other test uses it. It is loaded by path; a later load of `libcuda.so` finds it.
    pub(crate) fn new() -> Self {
        static TURN: Mutex<()> = Mutex::new(());
        static LIBRARY: OnceLock<Library> = OnceLock::new();
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let library = LIBRARY.get_or_init(|| {
            let path = FAKE_CUDA.expect("the stand-in is built where the kernels are");
            // SAFETY: the library was built for these tests and has no initialisers.
            unsafe { Library::new(path) }.expect("the stand-in can be loaded")
        });
        let fake = Self { library, _turn: turn };
        // The environment's settings are for a process with one test.
        if !is_child() {
            fake.set("reset", 0);
        }
        fake
    }

    /// Changes a setting: `Settings` in `tests/fake_cuda/fake.h`.
    pub(crate) fn set(&self, name: &str, value: i64) {
        let c_name = CString::new(name).unwrap();
        // SAFETY: the function has the type in control.cpp.
        let known = unsafe {
            let set = self
                .library
                .get::<unsafe extern "C" fn(*const c_char, c_longlong) -> c_int>("offcore_fake_set");
            set.unwrap()(c_name.as_ptr(), value)
        };
        assert_eq!(known, 1, "{name}: there is no such setting");
    }

    /// Sets the devices' name.
    pub(crate) fn name(&self, name: &str) {
        let name = CString::new(name).unwrap();
        // SAFETY: the function has the type in control.cpp.
        unsafe {
            let set = self.library.get::<unsafe extern "C" fn(*const c_char)>("offcore_fake_name");
            set.unwrap()(name.as_ptr());
        }
    }

    /// Returns the number of calls of an entry point.
    pub(crate) fn calls(&self, name: &str) -> u64 {
        let name = CString::new(name).unwrap();
        // SAFETY: the function has the type in control.cpp.
        unsafe {
            let calls =
                self.library.get::<unsafe extern "C" fn(*const c_char) -> c_ulonglong>("offcore_fake_calls");
            calls.unwrap()(name.as_ptr())
        }
    }

    /// Returns the live driver objects: contexts, streams, memory and so on.
    pub(crate) fn live(&self) -> String {
        // SAFETY: the function has the type in control.cpp. The text is valid until this thread's next call.
        unsafe {
            let live = self.library.get::<unsafe extern "C" fn() -> *const c_char>("offcore_fake_live");
            CStr::from_ptr(live.unwrap()()).to_str().unwrap().to_owned()
        }
    }
}

impl Drop for Fake {
    /// Asserts that a test has closed everything. A child process may leave a hung kernel.
    fn drop(&mut self) {
        if !is_child() && !std::thread::panicking() {
            assert_eq!(self.live(), "nothing");
        }
    }
}

/// In the environment of a process that runs one test: `processes`.
pub(crate) const CHILD: &str = "OFFCORE_TEST_CHILD";

/// Returns whether this process runs one test, for another process.
pub(crate) fn is_child() -> bool {
    std::env::var_os(CHILD).is_some()
}
