//! The library that `offcore exec` preloads. It connects the sockets of unmodified programs to the stack.
//!
//! A session's descriptor is one end of a pair of Unix sockets. Therefore, the kernel's `poll`, `select`, `epoll`,
//! `dup`, `fork` and other operations on descriptors work as usual. Only functions that transfer data or concern
//! addresses are replaced. [`offcore_session::wake`] describes the protocol of the pair.
//!
//! * `calls`: replacements for functions of libc,
//! * `decide`: turns kernel sockets into sessions, according to `rules`; `explain` prints the decisions,
//! * `stream` and `datagrams`: sending and receiving,
//! * `session`, `lock`: sessions that threads and processes share,
//! * `table`: maps descriptors to sessions; `polled`: epoll registrations of undecided sockets,
//! * `environment`, `programs`: pass the library to executed programs, and detect programs that cannot load it,
//! * `link`: the process's link to the stack; `listeners`: listeners that move to the next stack, with
//!   `kernel_listeners`; `lost`: the same for datagram sockets.
//!
//! The library runs within calls of arbitrary programs, in signal handlers and after `fork`. Therefore, it does not use
//! the standard library, allocates no memory on the data path, has no thread-local state, and makes its system calls
//! directly (`sys`). Calls that do not concern sessions are passed to libc (`real`).

#![cfg_attr(not(test), no_std)]
// Without the feature, the replacements for libc's functions are not called.
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
        // SAFETY: the dynamic linker passes the initial environment of the program.
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

    /// Nothing in this library panics. After a panic, the program could not continue.
    #[panic_handler]
    fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
        crate::report::print(&[b"offcore: the preload library failed: the process aborts\n"]);
        // SAFETY: `abort` takes no arguments and does not return.
        unsafe { libc::abort() }
    }

    /// The precompiled core library refers to this symbol. Nothing unwinds here.
    #[unsafe(no_mangle)]
    extern "C" fn rust_eh_personality() {}
}
