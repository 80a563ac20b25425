use super::*;
use crate::completion::{CompletionRecord, Status};

const PAGE: usize = 4096;

#[path = "../../../tests/spec/pages.rs"]
#[allow(dead_code, reason = "the specification suite uses the rest")]
mod pages;
use pages::Pages;

/// Returns two pages; the second has the access rights `protection`.
fn two_pages(protection: libc::c_int) -> Pages {
    install();
    Pages::protected(2, 1..2, protection)
}

#[test]
fn a_copy_stops_at_the_byte_that_faults() {
    let pages = two_pages(libc::PROT_NONE);
    let mut private = [7_u8; 300];
    // SAFETY: the test owns the pages and the array.
    unsafe {
        assert_eq!(
            write(pages.at(PAGE - 100), &private),
            Err(Fault { done: 100, address: pages.at(PAGE), write: true })
        );
        assert_eq!(
            read(pages.at(PAGE - 77), &mut private),
            Err(Fault { done: 77, address: pages.at(PAGE), write: false })
        );
        assert_eq!(write(pages.at(0), &private), Ok(()));
        assert_eq!(
            copy(pages.at(0), pages.at(PAGE), 5),
            Err(Fault { done: 0, address: pages.at(PAGE), write: false })
        );
        assert_eq!(copy(pages.at(0), pages.at(PAGE), 0), Ok(()));
    }
}

#[test]
fn unmapped_addresses_fault() {
    install();
    let mut private = [0_u8; 16];
    for address in [0, 8, 0x8000_0000_0000_0000, 0xffff_ffff_ffff_f000] {
        // SAFETY: the addresses are unmapped, so every access faults and is caught.
        unsafe {
            assert_eq!(read(address, &mut private), Err(Fault { done: 0, address, write: false }));
            assert_eq!(write(address, &private), Err(Fault { done: 0, address, write: true }));
            let there = private.as_mut_ptr() as u64;
            assert_eq!(copy(there, address, 16), Err(Fault { done: 0, address, write: false }));
            assert_eq!(copy(address, there, 16), Err(Fault { done: 0, address, write: true }));
        }
    }
}

#[test]
fn record_write_faults_are_returned() {
    let pages = two_pages(libc::PROT_NONE);
    let record = CompletionRecord::default();
    let written = Completed {
        status: Status::PAGE_FAULT,
        fault_was_write: true,
        result: 1,
        fault_info: 6,
        completed: 0x0102_0304,
        fault_address: 0x1122,
        specific: [0x33, 0x44],
    };
    // SAFETY: the test owns the record and the pages.
    unsafe {
        assert_eq!(write_record(&raw const record as u64, &written), Ok(()));
        assert_eq!(record.read(), Some(written));
        let place = pages.at(PAGE);
        assert_eq!(write_record(place, &written), Err(Fault { done: 0, address: place, write: true }));
    }
}

#[test]
fn truncated_file_faults() {
    install();
    let fd = rustix::fs::memfd_create("cut", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&fd, 2 * PAGE as u64).unwrap();
    let mapping = offcore_mem::Mapping::shared(std::os::fd::AsFd::as_fd(&fd), 0, 2 * PAGE).unwrap();
    rustix::fs::ftruncate(&fd, PAGE as u64).unwrap();
    let base = mapping.base().as_ptr() as u64;
    let mut private = [0_u8; 64];
    // SAFETY: the test owns the mapping.
    let outcome = unsafe { read(base + PAGE as u64 - 16, &mut private) };
    assert_eq!(outcome, Err(Fault { done: 16, address: base + PAGE as u64, write: false }));
}

#[test]
fn guarded_mapping_faults_for_the_device() {
    install();
    let fd = rustix::fs::memfd_create("guarded", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&fd, 2 * PAGE as u64).unwrap();
    let mapping = offcore_mem::Mapping::shared(std::os::fd::AsFd::as_fd(&fd), 0, 2 * PAGE).unwrap();
    let mapping = offcore_mem::sigbus::Guarded::new(mapping);
    rustix::fs::ftruncate(&fd, 0).unwrap();
    let (base, mut private) = (mapping.base().as_ptr() as u64, [7_u8; 64]);
    // SAFETY: the test owns the mapping.
    let outcome = unsafe { read(base, &mut private) };
    assert_eq!(outcome, Err(Fault { done: 0, address: base, write: false }));
    assert!(private == [7; 64] && !mapping.has_vanished());
    // SAFETY: the address is within the mapping, whose faults the guard catches.
    assert_eq!(unsafe { mapping.base().as_ptr().read_volatile() }, 0);
    assert!(mapping.has_vanished());
}
