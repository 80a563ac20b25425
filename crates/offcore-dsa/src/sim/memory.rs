//! Memory accesses of the device. An access to a missing page stops and reports a fault instead of ending the process.
//!
//! Every access is made by a few instructions at known addresses. A handler of SIGSEGV and SIGBUS recognizes these
//! addresses, records the fault, and resumes at the end of the routine, which returns the number of bytes not moved.
//! The number is exact, because the registers of a faulting string move refer to the faulting byte. A fault at another
//! address is passed to the previous handler: the standard library's for stack overflows, or the handler of
//! [`offcore_mem::sigbus`]. The latter protects accesses by the CPU, so it is installed before this one. A device that
//! meets a vanished page then reports a page fault, and the core that finishes the copy triggers the guard.
//!
//! Clients' memory is only accessed here, and never through a reference.

use std::arch::global_asm;
use std::cell::UnsafeCell;
use std::mem::MaybeUninit;
use std::sync::Once;

use crate::completion::Completed;

/// The position at which an access stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Fault {
    /// Number of bytes done before the fault.
    pub(super) done: usize,
    /// Address of the byte that could not be accessed.
    pub(super) address: u64,
    pub(super) write: bool,
}

/// The result of a routine, in RAX and RDX.
#[repr(C)]
struct Moved {
    /// Number of bytes not moved.
    left: usize,
    /// 0, or the kind of the fault, which the handler sets. The position follows from the bytes left.
    fault: u64,
}

/// In [`Moved::fault`]: the access was a write.
const WRITE: u64 = 1 << 63;
/// In [`Moved::fault`]: a fault occurred.
const FAULTED: u64 = 1 << 62;
/// In [`Moved::fault`]: it was a page fault, for which the CPU reports whether it was a write. A non-canonical address
/// causes another exception without this information.
const WRITE_KNOWN: u64 = 1 << 61;
/// The exception number of a page fault.
const PAGE_FAULT: i64 = 14;

global_asm!(
    // The symbols are global but hidden, because the compiler may place their callers in other objects of the program.
    ".globl offcore_dsa_sim_move",
    ".hidden offcore_dsa_sim_move",
    ".globl offcore_dsa_sim_move_at",
    ".hidden offcore_dsa_sim_move_at",
    ".globl offcore_dsa_sim_move_end",
    ".hidden offcore_dsa_sim_move_end",
    ".globl offcore_dsa_sim_move_back",
    ".hidden offcore_dsa_sim_move_back",
    ".globl offcore_dsa_sim_move_back_at",
    ".hidden offcore_dsa_sim_move_back_at",
    ".globl offcore_dsa_sim_move_back_end",
    ".hidden offcore_dsa_sim_move_back_end",
    ".globl offcore_dsa_sim_record",
    ".hidden offcore_dsa_sim_record",
    ".globl offcore_dsa_sim_record_at",
    ".hidden offcore_dsa_sim_record_at",
    ".globl offcore_dsa_sim_record_end",
    ".hidden offcore_dsa_sim_record_end",
    // (rdi: destination, rsi: source, rdx: length)
    "offcore_dsa_sim_move:",
    "mov rcx, rdx",
    "xor edx, edx",
    "offcore_dsa_sim_move_at:",
    "rep movsb",
    "offcore_dsa_sim_move_end:",
    "mov rax, rcx",
    "ret",
    // The same from the last byte to the first; the arguments point to the last bytes. The ABI requires a clear
    // direction flag on return, and the kernel clears the flag for a signal handler.
    "offcore_dsa_sim_move_back:",
    "mov rcx, rdx",
    "xor edx, edx",
    "std",
    "offcore_dsa_sim_move_back_at:",
    "rep movsb",
    "offcore_dsa_sim_move_back_end:",
    "cld",
    "mov rax, rcx",
    "ret",
    // (rdi: address of the record, rsi: 32 bytes): writes the status byte last. On x86, stores become visible in
    // program order.
    "offcore_dsa_sim_record:",
    "xor edx, edx",
    "xor eax, eax",
    "mov r8, [rsi + 8]",
    "mov r9, [rsi + 16]",
    "mov r10, [rsi + 24]",
    "mov r11d, [rsi + 4]",
    "mov cx, [rsi + 1]",
    "mov sil, [rsi]",
    "offcore_dsa_sim_record_at:",
    "mov [rdi + 8], r8",
    "mov [rdi + 16], r9",
    "mov [rdi + 24], r10",
    "mov [rdi + 4], r11d",
    "mov [rdi + 1], cx",
    "mov [rdi], sil",
    "offcore_dsa_sim_record_end:",
    "ret",
);

unsafe extern "sysv64" {
    fn offcore_dsa_sim_move(to: u64, from: u64, len: usize) -> Moved;
    fn offcore_dsa_sim_move_at();
    fn offcore_dsa_sim_move_end();
    fn offcore_dsa_sim_move_back(to_last: u64, from_last: u64, len: usize) -> Moved;
    fn offcore_dsa_sim_move_back_at();
    fn offcore_dsa_sim_move_back_end();
    fn offcore_dsa_sim_record(to: u64, from: *const u8) -> Moved;
    fn offcore_dsa_sim_record_at();
    fn offcore_dsa_sim_record_end();
}

/// Returns the fault of a routine that left `left` of `len` bytes; `at` holds the addresses at which it read and wrote.
#[cold]
fn fault(moved: &Moved, len: usize, at: (u64, u64)) -> Fault {
    // A general protection fault has no details: an address is not canonical.
    let canonical = |address: u64| address < 1 << 56;
    let write = moved.fault & WRITE != 0 || (moved.fault & WRITE_KNOWN == 0 && canonical(at.0));
    let address = if write { at.1 } else { at.0 };
    Fault { done: len - moved.left, address, write }
}

/// Copies `len` bytes from `from` to `to`, the first byte first.
///
/// # Safety
/// Both ranges are memory that a client gave the device or the caller owns, or unmapped addresses.
#[inline]
pub(super) unsafe fn copy(to: u64, from: u64, len: usize) -> Result<(), Fault> {
    debug_assert!(INSTALLED.is_completed());
    // SAFETY: both ranges belong to a client or the caller, or are unmapped. The installed handler catches faults.
    let moved = unsafe { offcore_dsa_sim_move(to, from, len) };
    if moved.fault == 0 {
        return Ok(());
    }
    let done = (len - moved.left) as u64;
    Err(fault(&moved, len, (from.wrapping_add(done), to.wrapping_add(done))))
}

/// Copies `len` bytes from `from` to `to`, the last byte first.
///
/// # Safety
/// As [`copy`].
pub(super) unsafe fn copy_backwards(to: u64, from: u64, len: usize) -> Result<(), Fault> {
    debug_assert!(INSTALLED.is_completed());
    if len == 0 {
        return Ok(());
    }
    let last = len as u64 - 1;
    // SAFETY: both ranges belong to a client or the caller, or are unmapped. The installed handler catches faults. The
    // routine leaves the direction flag clear.
    let moved = unsafe { offcore_dsa_sim_move_back(to.wrapping_add(last), from.wrapping_add(last), len) };
    if moved.fault == 0 {
        return Ok(());
    }
    let done = (len - moved.left) as u64;
    Err(fault(&moved, len, (from.wrapping_add(last - done), to.wrapping_add(last - done))))
}

/// Reads from `from` into private memory, which is filled up to a fault.
///
/// # Safety
/// The range is memory that a client gave the device, or unmapped addresses.
#[inline]
pub(super) unsafe fn read(from: u64, into: &mut [u8]) -> Result<(), Fault> {
    // SAFETY: the source is client memory or unmapped, as the caller guarantees; the destination is a valid slice.
    unsafe { copy(into.as_mut_ptr() as u64, from, into.len()) }
}

/// Writes private memory to `to`, up to a fault.
///
/// # Safety
/// The range is memory that a client gave the device, or unmapped addresses.
#[inline]
pub(super) unsafe fn write(to: u64, from: &[u8]) -> Result<(), Fault> {
    // SAFETY: the destination is client memory or unmapped, as the caller guarantees; the source is a valid slice.
    unsafe { copy(to, from.as_ptr() as u64, from.len()) }
}

/// Writes a completion record, the status byte last. A reader of the status byte sees everything that was written
/// before it.
///
/// # Safety
/// The 32 bytes are 32-byte aligned, and are memory that a client gave the device, or unmapped.
#[inline]
pub(super) unsafe fn write_record(to: u64, record: &Completed) -> Result<(), Fault> {
    debug_assert!(INSTALLED.is_completed() && to.is_multiple_of(32));
    let write = if record.fault_was_write { 0x80 } else { 0 };
    let head = u64::from(record.status.0 | write)
        | u64::from(record.result) << 8
        | u64::from(record.fault_info) << 16
        | u64::from(record.completed) << 32;
    let words = [head, record.fault_address, record.specific[0], record.specific[1]];
    // SAFETY: the record is client memory or unmapped, as the caller guarantees; a fault is caught by the handler.
    let moved = unsafe { offcore_dsa_sim_record(to, words.as_ptr().cast()) };
    if moved.fault == 0 { Ok(()) } else { Err(Fault { done: 0, address: to, write: true }) }
}

static INSTALLED: Once = Once::new();

struct Previous(UnsafeCell<[MaybeUninit<libc::sigaction>; 2]>);

// SAFETY: each element is written once, before the handler that reads it can run for that signal.
unsafe impl Sync for Previous {}

/// The previous actions for SIGSEGV and SIGBUS.
static PREVIOUS: Previous = Previous(UnsafeCell::new([MaybeUninit::uninit(); 2]));

/// Installs the handler, once per process. All accesses in this module require it.
pub(super) fn install() {
    INSTALLED.call_once(|| {
        // If the handler of memory guards were installed after this one, it would replace the pages at which a device
        // must fault by zeros.
        offcore_mem::sigbus::install_handler();
        for (signal, at) in [(libc::SIGSEGV, 0), (libc::SIGBUS, 1)] {
            // SAFETY: an all-zero sigaction is a valid value.
            let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
            action.sa_sigaction = handler as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
            let place = PREVIOUS.0.get().cast::<libc::sigaction>();
            // SAFETY: `at` is an index of the array. The previous action is stored before the handler is installed, so
            // the handler never reads an unset action. The handler is async-signal-safe.
            unsafe {
                libc::sigaction(signal, std::ptr::null(), place.add(at));
                libc::sigaction(signal, &raw const action, std::ptr::null_mut());
            }
        }
    });
}

extern "C" fn handler(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid context to an SA_SIGINFO handler, and nothing else accesses it meanwhile.
    let registers = unsafe { &mut (*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs };
    let at = registers[libc::REG_RIP as usize] as usize;
    let here = |symbol: unsafe extern "sysv64" fn()| symbol as usize;
    let resume = if at == here(offcore_dsa_sim_move_at) {
        here(offcore_dsa_sim_move_end)
    } else if at == here(offcore_dsa_sim_move_back_at) {
        here(offcore_dsa_sim_move_back_end)
    } else if (here(offcore_dsa_sim_record_at)..here(offcore_dsa_sim_record_end)).contains(&at) {
        here(offcore_dsa_sim_record_end)
    } else {
        return chain_signal(signal, info, context);
    };
    let told = if registers[libc::REG_TRAPNO as usize] == PAGE_FAULT { WRITE_KNOWN } else { 0 };
    // Bit 1 of a page fault's error code: the access was a write.
    let write = if registers[libc::REG_ERR as usize] & 2 != 0 { WRITE } else { 0 };
    registers[libc::REG_RDX as usize] = (FAULTED | told | write).cast_signed();
    registers[libc::REG_RIP as usize] = resume as i64;
}

/// Passes a foreign fault to the previous handler.
fn chain_signal(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let at = usize::from(signal == libc::SIGBUS);
    // SAFETY: `install` stored the action of this signal before the handler could run; the arguments are the handler's.
    unsafe {
        offcore_mem::sigbus::chain_signal((*PREVIOUS.0.get())[at].assume_init_ref(), signal, info, context)
    };
}

#[cfg(test)]
mod tests;
