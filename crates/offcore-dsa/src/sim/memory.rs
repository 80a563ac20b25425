//! The device's way to memory: accesses that stop at a page that is not there, instead of ending the process.
//!
//! Every access is made by a few instructions whose addresses are known. A handler of SIGSEGV and SIGBUS recognizes
//! them, notes where the fault was, and lets the routine return how much it had not done: exactly, since a string move
//! that faults has its registers at the byte that faulted. A fault anywhere else goes to the handler that was there
//! before: the standard library's for stack overflows, or the one of [`offcore_mem::sigbus`]. The latter's guards are for
//! the CPU's accesses, so it is installed before ours: a device that meets a vanished page reports a page fault, and the
//! core that finishes the copy trips the guard.
//!
//! Clients' memory is only touched here, and never through a reference.

use std::arch::global_asm;
use std::cell::UnsafeCell;
use std::mem::MaybeUninit;
use std::sync::Once;

use crate::completion::Completed;

/// Where an access stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Fault {
    /// Bytes done before.
    pub(super) done: usize,
    /// The byte that could not be accessed.
    pub(super) address: u64,
    pub(super) write: bool,
}

/// What a routine returns, in RAX and RDX.
#[repr(C)]
struct Moved {
    /// Bytes not moved.
    left: usize,
    /// 0, or of what kind the fault was: the handler sets it. Where it was, the bytes left tell.
    fault: u64,
}

/// In [`Moved::fault`]: the access was a write.
const WRITE: u64 = 1 << 63;
/// In [`Moved::fault`]: there was a fault.
const FAULTED: u64 = 1 << 62;
/// In [`Moved::fault`]: it was a page fault, of which the CPU tells whether it was a write. An address that is no address
/// at all faults without being told.
const TOLD: u64 = 1 << 61;
/// The exception number of a page fault.
const PAGE_FAULT: i64 = 14;

global_asm!(
    // For the whole program, and not beyond it: the compiler may put their callers into other objects.
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
    // (rdi: to, rsi: from, rdx: length)
    "offcore_dsa_sim_move:",
    "mov rcx, rdx",
    "xor edx, edx",
    "offcore_dsa_sim_move_at:",
    "rep movsb",
    "offcore_dsa_sim_move_end:",
    "mov rax, rcx",
    "ret",
    // The same, from the last byte to the first; the arguments point to the last bytes. The ABI wants the direction flag
    // clear, and the kernel clears it for a signal handler.
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
    // (rdi: the record's place, rsi: 32 bytes): the status byte last. Stores of x86 become visible in their order.
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

/// The fault of a routine that left `left` of `len` bytes; `at` are the addresses it was at: to read and to write.
#[cold]
fn fault(moved: &Moved, len: usize, at: (u64, u64)) -> Fault {
    // A general protection fault tells nothing: one of the addresses is no address.
    let canonical = |address: u64| address < 1 << 56;
    let write = moved.fault & WRITE != 0 || (moved.fault & TOLD == 0 && canonical(at.0));
    let address = if write { at.1 } else { at.0 };
    Fault { done: len - moved.left, address, write }
}

/// Copies `len` bytes from `from` to `to`, the first one first.
///
/// # Safety
/// Both ranges are memory that a client gave the device, or not mapped; or memory of the caller's.
#[inline]
pub(super) unsafe fn copy(to: u64, from: u64, len: usize) -> Result<(), Fault> {
    debug_assert!(INSTALLED.is_completed());
    // SAFETY: the caller vouches for what is mapped; a fault is caught by the handler, which is installed.
    let moved = unsafe { offcore_dsa_sim_move(to, from, len) };
    if moved.fault == 0 {
        return Ok(());
    }
    let done = (len - moved.left) as u64;
    Err(fault(&moved, len, (from.wrapping_add(done), to.wrapping_add(done))))
}

/// Copies `len` bytes from `from` to `to`, the last one first.
///
/// # Safety
/// As [`copy`].
pub(super) unsafe fn copy_backwards(to: u64, from: u64, len: usize) -> Result<(), Fault> {
    debug_assert!(INSTALLED.is_completed());
    if len == 0 {
        return Ok(());
    }
    let last = len as u64 - 1;
    // SAFETY: as in `copy`; the routine leaves the direction flag clear.
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
/// The range is memory that a client gave the device, or not mapped.
#[inline]
pub(super) unsafe fn read(from: u64, into: &mut [u8]) -> Result<(), Fault> {
    // SAFETY: as the caller promises; the destination is ours.
    unsafe { copy(into.as_mut_ptr() as u64, from, into.len()) }
}

/// Writes private memory to `to`, up to a fault.
///
/// # Safety
/// The range is memory that a client gave the device, or not mapped.
#[inline]
pub(super) unsafe fn write(to: u64, from: &[u8]) -> Result<(), Fault> {
    // SAFETY: as the caller promises; the source is ours.
    unsafe { copy(to, from.as_ptr() as u64, from.len()) }
}

/// Writes a completion record, the status byte last: whoever sees it sees what was written before.
///
/// # Safety
/// The 32 bytes, which are 32-byte aligned, are memory that a client gave the device, or not mapped.
#[inline]
pub(super) unsafe fn write_record(to: u64, record: &Completed) -> Result<(), Fault> {
    debug_assert!(INSTALLED.is_completed() && to.is_multiple_of(32));
    let write = if record.fault_was_write { 0x80 } else { 0 };
    let head = u64::from(record.status.0 | write)
        | u64::from(record.result) << 8
        | u64::from(record.fault_info) << 16
        | u64::from(record.completed) << 32;
    let words = [head, record.fault_address, record.specific[0], record.specific[1]];
    // SAFETY: the caller vouches for the record's place; a fault is caught.
    let moved = unsafe { offcore_dsa_sim_record(to, words.as_ptr().cast()) };
    if moved.fault == 0 { Ok(()) } else { Err(Fault { done: 0, address: to, write: true }) }
}

static INSTALLED: Once = Once::new();

struct Previous(UnsafeCell<[MaybeUninit<libc::sigaction>; 2]>);

// SAFETY: each of the two is written once, before the handler that reads it can run for that signal.
unsafe impl Sync for Previous {}

/// What was there before us for SIGSEGV and SIGBUS.
static PREVIOUS: Previous = Previous(UnsafeCell::new([MaybeUninit::uninit(); 2]));

/// Installs the handler, once in a process. Everything else here needs it.
pub(super) fn install() {
    INSTALLED.call_once(|| {
        // A guard's handler that came after ours would make zeroes of the pages that a device is to fault at.
        offcore_mem::sigbus::install_handler();
        for (signal, at) in [(libc::SIGSEGV, 0), (libc::SIGBUS, 1)] {
            // SAFETY: an all-zero sigaction is a valid value to fill in.
            let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
            action.sa_sigaction = handler as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
            let place = PREVIOUS.0.get().cast::<libc::sigaction>();
            // SAFETY: `at` is in the array. The previous action is read first and our handler installed only then, so that
            // the handler never sees an unset one; it only does what is allowed in a handler.
            unsafe {
                libc::sigaction(signal, std::ptr::null(), place.add(at));
                libc::sigaction(signal, &raw const action, std::ptr::null_mut());
            }
        }
    });
}

extern "C" fn handler(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid context to an SA_SIGINFO handler, which nobody else looks at now.
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
        return pass_on(signal, info, context);
    };
    let told = if registers[libc::REG_TRAPNO as usize] == PAGE_FAULT { TOLD } else { 0 };
    // Bit 1 of a page fault's error code: it was a write.
    let write = if registers[libc::REG_ERR as usize] & 2 != 0 { WRITE } else { 0 };
    registers[libc::REG_RDX as usize] = (FAULTED | told | write).cast_signed();
    registers[libc::REG_RIP as usize] = resume as i64;
}

/// Not ours: what was there before us decides.
fn pass_on(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let at = usize::from(signal == libc::SIGBUS);
    // SAFETY: `install` filled in the action of this signal before this handler, whose arguments these are, could run for it.
    unsafe { offcore_mem::sigbus::pass_on((*PREVIOUS.0.get())[at].assume_init_ref(), signal, info, context) };
}

#[cfg(test)]
mod tests;
