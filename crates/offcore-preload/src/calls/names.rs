//! Name resolution by glibc's resolver.
//!
//! The resolver makes system calls directly, so the library cannot replace its socket functions. It uses syscall user
//! dispatch instead (Linux 5.11): while a resolver function runs, each system call of its thread raises SIGSYS, except
//! for calls from this library. The signal handler passes the call to [`number::syscall`]. The resolver's sockets are
//! then handled like all other sockets. Its configuration, modules and caches do not change.
//!
//! The handler stays installed. It passes other SIGSYS signals to the previous handler.

use core::arch::{asm, naked_asm};
use core::ffi::{c_char, c_int, c_long, c_void};
use core::ptr;
use core::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicUsize, Ordering};

use libc::{addrinfo, hostent, siginfo_t, size_t, sockaddr, socklen_t, ucontext_t};

use super::number;
use crate::link;
use crate::real;
use crate::report;
use crate::sys;

/// Constants of `linux/prctl.h` and `asm-generic/siginfo.h` that the crate libc lacks.
const PR_SET_SYSCALL_USER_DISPATCH: c_int = 59;
const DISPATCH_OFF: usize = 0;
const DISPATCH_ON: usize = 1;
const SYS_USER_DISPATCH: c_int = 2;
/// Values of a selector.
const ALLOW: u8 = 0;
const BLOCK: u8 = 1;

/// Maximum number of threads that resolve names at the same time. More threads wait.
const MOST: usize = 256;

/// A thread that resolves a name.
struct Thread {
    /// Number of the thread, or 0 for a free entry.
    number: AtomicU32,
    /// Whether system calls of the thread are dispatched. The kernel reads this byte.
    selector: AtomicU8,
}

static THREADS: [Thread; MOST] =
    [const { Thread { number: AtomicU32::new(0), selector: AtomicU8::new(ALLOW) } }; MOST];

fn this_thread() -> Option<&'static Thread> {
    let number = sys::thread();
    THREADS.iter().find(|thread| thread.number.load(Ordering::Relaxed) == number)
}

/// Runs a resolver function.
fn run_resolver<T>(resolve: impl FnOnce() -> T) -> T {
    if !link::is_used() || sys::is_sandboxed() || this_thread().is_some() {
        return resolve();
    }
    let thread = loop {
        let free = |thread: &&Thread| {
            let number = &thread.number;
            number.compare_exchange(0, sys::thread(), Ordering::AcqRel, Ordering::Relaxed).is_ok()
        };
        match THREADS.iter().find(free) {
            Some(thread) => break thread,
            None => sys::sleep(1),
        }
    };
    let result = match begin(thread) {
        Ok(mask) => {
            let result = resolve();
            end(thread, mask);
            result
        }
        Err(_) => {
            report::no_dispatch();
            resolve()
        }
    };
    thread.number.store(0, Ordering::Release);
    result
}

/// Enables the dispatch for this thread. Returns its previous signal mask.
fn begin(thread: &Thread) -> Result<u64, sys::Errno> {
    handle_signal()?;
    let mask = sys::unblock(libc::SIGSYS)?;
    let (from, len) = sys::text_segment();
    thread.selector.store(BLOCK, Ordering::Relaxed);
    let dispatched = dispatch(DISPATCH_ON, from, len, thread.selector.as_ptr() as usize);
    dispatched.map(|()| mask).inspect_err(|_| {
        thread.selector.store(ALLOW, Ordering::Relaxed);
        sys::set_mask(mask);
    })
}

fn end(thread: &Thread, mask: u64) {
    thread.selector.store(ALLOW, Ordering::Relaxed);
    let _ = dispatch(DISPATCH_OFF, 0, 0, 0);
    sys::set_mask(mask);
}

fn dispatch(mode: usize, from: usize, len: usize, selector: usize) -> Result<(), sys::Errno> {
    let args = [PR_SET_SYSCALL_USER_DISPATCH as usize, mode, from, len, selector, 0];
    // SAFETY: the selector is a static byte, which the kernel only reads.
    sys::result(unsafe { sys::call(libc::SYS_prctl, args) }).map(drop)
}

/// The kernel's `struct sigaction`.
#[repr(C)]
struct Action {
    handler: usize,
    flags: u64,
    restorer: usize,
    mask: u64,
}

/// The previous handler of SIGSYS, and whether it takes three arguments.
static BEFORE: AtomicUsize = AtomicUsize::new(libc::SIG_DFL);
static BEFORE_TAKES_INFO: AtomicBool = AtomicBool::new(false);

fn action(new: Option<&Action>, old: &mut Action) -> Result<(), sys::Errno> {
    let new = new.map_or(0, |new| ptr::from_ref(new) as usize);
    let args = [libc::SIGSYS as usize, new, ptr::from_mut(old) as usize, 8, 0, 0];
    // SAFETY: both actions live until the call returns, and have the layout of the kernel's structure.
    sys::result(unsafe { sys::call(libc::SYS_rt_sigaction, args) }).map(drop)
}

/// Installs [`handle_sigsys`] as the handler of SIGSYS.
fn handle_signal() -> Result<(), sys::Errno> {
    const SA_RESTORER: u64 = 0x0400_0000;
    let handler = handle_sigsys as *const () as usize;
    let mut old = Action { handler: 0, flags: 0, restorer: 0, mask: 0 };
    action(None, &mut old)?;
    if old.handler == handler {
        return Ok(());
    }
    BEFORE.store(old.handler, Ordering::Relaxed);
    BEFORE_TAKES_INFO.store(old.flags & libc::SA_SIGINFO as u64 != 0, Ordering::Relaxed);
    // Other handlers may interrupt this one, just as they may interrupt the system call.
    let flags = libc::SA_SIGINFO as u64 | libc::SA_NODEFER as u64 | SA_RESTORER;
    let ours = Action { handler, flags, restorer: return_from_signal as *const () as usize, mask: 0 };
    action(Some(&ours), &mut old)
}

#[unsafe(naked)]
unsafe extern "C" fn return_from_signal() {
    naked_asm!("mov eax, 15", "syscall")
}

/// Handles SIGSYS.
unsafe extern "C" fn handle_sigsys(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel passes valid pointers to the signal information and to the context of this thread.
    let (code, registers) =
        unsafe { ((*info).si_code, &mut (*context.cast::<ucontext_t>()).uc_mcontext.gregs) };
    let thread = this_thread().filter(|_| code == SYS_USER_DISPATCH);
    let Some(thread) = thread else {
        // SAFETY: the arguments come from the kernel and are passed on unchanged.
        return unsafe { call_previous_handler(signal, info, context) };
    };
    let [number, a, b, c, d, e, f] = [
        libc::REG_RAX,
        libc::REG_RDI,
        libc::REG_RSI,
        libc::REG_RDX,
        libc::REG_R10,
        libc::REG_R8,
        libc::REG_R9,
    ]
    .map(|register| registers[register as usize] as usize);
    match number as c_long {
        // A signal handler of the program returns. Its signal frame is at the program's stack pointer.
        // SAFETY: at `rt_sigreturn`, the stack pointer of the interrupted context points to the frame of the returning
        // handler.
        libc::SYS_rt_sigreturn => unsafe { sigreturn(registers[libc::REG_RSP as usize] as usize) },
        // The child starts behind the system call instruction. So the call is repeated without dispatch, which stays
        // off.
        libc::SYS_clone | libc::SYS_clone3 | libc::SYS_vfork => {
            thread.selector.store(ALLOW, Ordering::Relaxed);
            registers[libc::REG_RIP as usize] -= 2;
        }
        number => {
            // The library may call libc. System calls of libc must not be dispatched.
            thread.selector.store(ALLOW, Ordering::Relaxed);
            let errno = sys::errno();
            // SAFETY: these are the unchanged arguments of the program's own system call.
            let result = unsafe { number::syscall(number, a, b, c, d, e, f) };
            registers[libc::REG_RAX as usize] = if result == -1 { -i64::from(sys::errno()) } else { result };
            sys::set_errno(errno);
            thread.selector.store(BLOCK, Ordering::Relaxed);
        }
    }
}

/// Returns from a handler whose signal frame is at `stack`.
unsafe fn sigreturn(stack: usize) -> ! {
    // SAFETY: `stack` is the address of a signal frame, as the caller guarantees; the kernel restores the context from
    // it and never returns here.
    unsafe { asm!("mov rsp, {}", "mov eax, 15", "syscall", in(reg) stack, options(noreturn)) }
}

/// Calls the previous handler.
unsafe fn call_previous_handler(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    let handler = BEFORE.load(Ordering::Relaxed);
    match handler {
        libc::SIG_IGN => {}
        libc::SIG_DFL => {
            let default = Action { handler, flags: 0, restorer: 0, mask: 0 };
            let mut old = Action { handler: 0, flags: 0, restorer: 0, mask: 0 };
            let _ = action(Some(&default), &mut old);
            sys::raise(signal);
        }
        _ if BEFORE_TAKES_INFO.load(Ordering::Relaxed) => {
            // SAFETY: the handler was installed with `SA_SIGINFO`, so it has this type.
            let handler: unsafe extern "C" fn(c_int, *mut siginfo_t, *mut c_void) =
                unsafe { core::mem::transmute(handler) };
            // SAFETY: these are the arguments that the kernel passed to this handler.
            unsafe { handler(signal, info, context) };
        }
        _ => {
            // SAFETY: the handler was installed without `SA_SIGINFO`, so it has this type.
            let handler: unsafe extern "C" fn(c_int) = unsafe { core::mem::transmute(handler) };
            // SAFETY: this is the argument that the kernel passed to this handler.
            unsafe { handler(signal) };
        }
    }
}

/// Functions of libc that resolve names.
macro_rules! names {
    ($(fn $name:ident($($arg:ident: $type:ty),* $(,)?) -> $ret:ty;)*) => {$(
        #[allow(clippy::too_many_arguments, reason = "as the functions")]
        #[cfg_attr(feature = "interpose", unsafe(no_mangle))]
        unsafe extern "C" fn $name($($arg: $type),*) -> $ret {
            // SAFETY: the caller passes pointers and lengths that are valid for libc's function of the same name.
            run_resolver(|| unsafe { real::resolver::$name($($arg),*) })
        }
    )*};
}

real::resolvers!(names);
