//! The library that `offcore exec` preloads: sockets of unmodified programs, on the stack.
//!
//! A session's descriptor is one end of a pair of Unix sockets, so that the kernel's `poll`, `select` and `epoll`, its
//! `dup`, `fork` and everything else that concerns descriptors do what they always do; only what moves bytes or asks about
//! addresses comes here. [`offcore_session::wake`] has the rules of that pair.
//!
//! * `calls`: libc's functions that are replaced,
//! * `decide`: when a socket of the kernel's becomes a session, by `rules`; `explain`: telling of it,
//! * `stream` and `datagrams`: what is sent and received,
//! * `session`, `lock`: a session among threads and processes,
//! * `table`: which descriptors are sessions; `polled`: what epoll sets have of those that are not yet,
//! * `environment`, `programs`: executed programs get the library, and which do not,
//! * `link`: the process's link to the stack; `listeners`: listeners that move to the next stack, with `kernel_listeners`; `lost`:
//!   datagram sockets that do.
//!
//! The library runs inside of other people's calls, in signal handlers and after `fork`. So it has no standard library, asks
//! for no memory on the way of data, has no thread-local state, and makes system calls of its own (`sys`). What is no
//! session's goes to libc (`real`).

#![cfg_attr(not(test), no_std)]
// Without the feature nobody calls what replaces libc's functions.
#![cfg_attr(not(feature = "interpose"), allow(dead_code))]

#[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
compile_error!("the preload library makes system calls of x86-64 Linux");

mod address;
mod adopt;
mod calls;
mod carried;
mod control;
mod datagram_options;
mod datagrams;
mod decide;
#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests may")]
mod documented_options;
mod environment;
mod explain;
mod kernel_listeners;
mod link;
mod listeners;
mod lock;
mod lost;
mod memberships;
mod options;
mod polled;
mod programs;
mod real;
mod report;
mod rules;
mod session;
mod step;
mod stream;
mod stream_options;
mod sys;
mod table;
mod urgent;
mod vectors;

#[cfg(feature = "interpose")]
mod begin {
    use core::ffi::{c_char, c_int};

    /// Runs before the program, and before the constructors of its other libraries.
    extern "C" fn begin(_: c_int, _: *const *const c_char, environment: *const *mut c_char) {
        crate::real::find();
        // SAFETY: the environment that the program begins with.
        if unsafe { crate::environment::read(environment) } {
            crate::table::make();
            crate::link::begin();
            crate::programs::begin();
            crate::adopt::inherit();
            crate::calls::stdio::standard();
        }
    }

    #[used]
    #[unsafe(link_section = ".init_array")]
    static BEGIN: extern "C" fn(c_int, *const *const c_char, *const *mut c_char) = begin;

    /// Nothing here panics; if it did, the program would be in no state to go on.
    #[panic_handler]
    fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
        crate::report::print(&[b"offcore: the preload library failed: the process aborts\n"]);
        // SAFETY: it ends the process.
        unsafe { libc::abort() }
    }

    /// What the core library was compiled to refer to; nothing unwinds here.
    #[unsafe(no_mangle)]
    extern "C" fn rust_eh_personality() {}
}
