//! The fake driver detects the errors on which tests rely.

use std::ffi::c_void;
use std::ptr::{from_ref, null_mut};
use std::time::{Duration, Instant};

use cudarc::driver::sys::{self, CUresult};
use offcore_gpu::layout::{Kind, PipelineView, PoolView, QUIT, RingView, SlotHead, TrieView, WorkView};

use crate::processes::in_a_process;
use crate::rig::{Fake, is_child};

const PTX: &str = concat!(include_str!("../../kernels/kernels.ptx"), "\0");
const OK: CUresult = CUresult::CUDA_SUCCESS;

/// A context, a stream and the persistent kernel, through the driver API.
struct Opened {
    stream: sys::CUstream,
    module: sys::CUmodule,
    kernel: sys::CUfunction,
}

fn open() -> Opened {
    let (mut context, mut stream, mut module, mut kernel) = (null_mut(), null_mut(), null_mut(), null_mut());
    // SAFETY: all outputs are valid for writes; the texts are zero-terminated.
    unsafe {
        assert_eq!(sys::cuInit(0), OK);
        assert_eq!(sys::cuDevicePrimaryCtxRetain(&mut context, 0), OK);
        assert_eq!(sys::cuCtxSetCurrent(context), OK);
        assert_eq!(sys::cuStreamCreateWithPriority(&mut stream, 1, 0), OK);
        let image = PTX.as_ptr().cast();
        assert_eq!(sys::cuModuleLoadDataEx(&mut module, image, 0, null_mut(), null_mut()), OK);
        assert_eq!(sys::cuModuleGetFunction(&mut kernel, module, c"og_persistent".as_ptr()), OK);
    }
    Opened { stream, module, kernel }
}

impl Opened {
    /// Launches the kernel for a ring of two slots at `slots`, followed by answers.
    fn launch(&self, slots: *mut u8) -> CUresult {
        let view = PipelineView {
            pool: PoolView { base: null_mut(), staging: null_mut(), chunk_shift: 11, chunks: 0 },
            ring: RingView {
                slots,
                answers: slots.wrapping_add(128),
                slot_stride: 64,
                answer_stride: 64,
                count: 2,
                reserved: 0,
            },
            work: WorkView { kind: Kind::Nothing, swap: 0, skip: 0, forced_ns: 0, trie: TrieView::EMPTY },
        };
        let (first, step, from_turn) = (0u32, 1u32, 0u64);
        let mut parameters: [*mut c_void; 4] = [
            from_ref(&view).cast_mut().cast(),
            from_ref(&first).cast_mut().cast(),
            from_ref(&step).cast_mut().cast(),
            from_ref(&from_turn).cast_mut().cast(),
        ];
        // SAFETY: these are the kernel's parameters, which are copied. The fake driver checks all addresses in them.
        unsafe {
            sys::cuLaunchKernel(
                self.kernel,
                1,
                1,
                1,
                32,
                1,
                1,
                0,
                self.stream,
                parameters.as_mut_ptr(),
                null_mut(),
            )
        }
    }

    fn close(self) {
        // SAFETY: all handles are the fake driver's.
        unsafe {
            sys::cuStreamDestroy_v2(self.stream);
            sys::cuModuleUnload(self.module);
            assert_eq!(sys::cuDevicePrimaryCtxRelease_v2(0), OK);
        }
    }

    fn wait_for(&self, wanted: CUresult) {
        let since = Instant::now();
        loop {
            // SAFETY: the stream is valid.
            let found = unsafe { sys::cuStreamQuery(self.stream) };
            if found == wanted {
                return;
            }
            assert_eq!(found, CUresult::CUDA_ERROR_NOT_READY);
            assert!(since.elapsed() < Duration::from_secs(10), "no progress for 10 s");
            std::thread::yield_now();
        }
    }
}

/// A ring of two slots and two answers, registered.
struct Ring {
    memory: Box<[u64]>,
    device: *mut u8,
}

impl Ring {
    fn new() -> Self {
        let mut memory = vec![0u64; 64].into_boxed_slice();
        let mut at = 0;
        // SAFETY: the memory stays until it is unregistered.
        unsafe {
            assert_eq!(sys::cuMemHostRegister_v2(memory.as_mut_ptr().cast(), 512, 3), OK);
            assert_eq!(sys::cuMemHostGetDevicePointer_v2(&mut at, memory.as_mut_ptr().cast(), 0), OK);
        }
        Self { memory, device: std::ptr::without_provenance_mut(at as usize) }
    }

    fn quit(&mut self) {
        let head = SlotHead { lap: 1, count: QUIT };
        // SAFETY: a head is a slot's first eight bytes, written at once.
        unsafe { self.memory.as_mut_ptr().write_volatile(std::mem::transmute::<SlotHead, u64>(head)) };
    }

    fn close(mut self) {
        // SAFETY: registered in `new`.
        unsafe { sys::cuMemHostUnregister(self.memory.as_mut_ptr().cast()) };
    }
}

#[test]
fn kernel_ends_at_quit_without_leaks() {
    let fake = Fake::new();
    assert_eq!(fake.live(), "nothing");
    let opened = open();
    let mut ring = Ring::new();
    assert_eq!(fake.live(), "1 contexts, 1 modules, 1 streams, 1 registrations");
    assert_eq!(opened.launch(ring.device), OK);
    opened.wait_for(CUresult::CUDA_ERROR_NOT_READY);
    ring.quit();
    opened.wait_for(OK);
    ring.close();
    opened.close();
}

#[test]
fn host_pointer_in_kernel_ends_context() {
    let fake = Fake::new();
    for by_host in [true, false] {
        let opened = open();
        let mut ring = Ring::new();
        // The second address is outside the registration.
        let wrong =
            if by_host { ring.memory.as_mut_ptr().cast() } else { ring.device.wrapping_add(512 - 64) };
        assert_eq!(opened.launch(wrong), OK);
        opened.wait_for(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
        assert_eq!(opened.launch(ring.device), CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
        ring.close();
        opened.close();
        assert_eq!(fake.live(), "nothing");
    }
    // With host pointers, both addresses are equal.
    fake.set("host_pointers", 1);
    let opened = open();
    let mut ring = Ring::new();
    assert_eq!(ring.device, ring.memory.as_mut_ptr().cast());
    ring.quit();
    assert_eq!(opened.launch(ring.device), OK);
    opened.wait_for(OK);
    ring.close();
    opened.close();
}

#[test]
fn thread_without_context_is_refused() {
    let fake = Fake::new();
    let opened = open();
    let refused = std::thread::spawn(|| {
        let mut at = 0;
        // SAFETY: the output is valid for writes.
        unsafe { sys::cuMemAlloc_v2(&mut at, 64) }
    });
    assert_eq!(refused.join().unwrap(), CUresult::CUDA_ERROR_INVALID_CONTEXT);
    opened.close();
    assert_eq!(fake.calls("cuMemAlloc_v2"), 1);
}

#[test]
fn memory_is_registered_once() {
    let fake = Fake::new();
    let opened = open();
    let ring = Ring::new();
    let base = ring.memory.as_ptr().cast_mut();
    let mut at = 0;
    // SAFETY: the fake driver checks every address.
    unsafe {
        let twice = sys::cuMemHostRegister_v2(base.wrapping_add(8).cast(), 64, 1);
        assert_eq!(twice, CUresult::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
        let elsewhere = sys::cuMemHostUnregister(base.wrapping_add(8).cast());
        assert_eq!(elsewhere, CUresult::CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
        assert_eq!(sys::cuMemAlloc_v2(&mut at, 100), OK);
        assert_eq!(sys::cuMemFree_v2(at + 8), CUresult::CUDA_ERROR_INVALID_VALUE);
        assert_eq!(sys::cuMemFree_v2(at), OK);
        assert_eq!(sys::cuMemFree_v2(at), CUresult::CUDA_ERROR_INVALID_VALUE);
        fake.set("memory", 99);
        assert_eq!(sys::cuMemAlloc_v2(&mut at, 100), CUresult::CUDA_ERROR_OUT_OF_MEMORY);
    }
    ring.close();
    opened.close();
}

/// A real driver would block forever, but the fake driver ends the process.
#[test]
fn free_during_a_kernel_ends_the_process() {
    const NAME: &str = "driver::free_during_a_kernel_ends_the_process";
    if !is_child() {
        let output = in_a_process(NAME, &[("OFFCORE_FAKE_TIMEOUT", "1")]);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && said.contains("cuMemFree waits for kernels"), "{said}");
        return;
    }
    let _fake = Fake::new();
    let opened = open();
    let ring = Ring::new();
    let mut at = 0;
    // SAFETY: the output is valid for writes.
    assert_eq!(unsafe { sys::cuMemAlloc_v2(&mut at, 64) }, OK);
    assert_eq!(opened.launch(ring.device), OK);
    // SAFETY: allocated just before.
    unsafe { sys::cuMemFree_v2(at) };
    unreachable!("the process should have ended");
}
