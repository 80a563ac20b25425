//! Bugs of other back ends, tested again with the features that drivers negotiate today (checksums, segmentation,
//! packed virtqueues), with a real socket and on every path. Meanwhile, an honest guest and a neighbour must keep
//! working.
//!
//! The following lists say where each row of the checklist is tested. "Here" is this file. The first list is by DPDK's
//! report or fix:
//!
//! * CVE-2018-1059: `checklist`: `cve_2018_1059_*`; here `cve_2018_1059_ranges`
//! * CVE-2019-14818: `control_descriptors`: `requests_leak_no_descriptors`; `control`: `wrong_fd_counts_are_refused`;
//!   here `cve_2019_14818_files_with_any_message`
//! * CVE-2020-10722: `control`: `invalid_log_is_refused`; here `cve_2020_10722_log_that_wraps_around`
//! * CVE-2020-10723: `control`: `unknown_virtqueues_are_refused`; here `cve_2020_10723_index_of_32_bits`
//! * CVE-2020-10724, -14374, -14376, -14377: not applicable, because Offcore has no cryptography device
//! * CVE-2020-10725: `checklist`: `cve_2020_10725_zero_length`; here `cve_2020_10725_empty_buffers`
//! * CVE-2020-10726, 2021-3839, 2022-0669: `control_descriptors`: `requests_leak_no_descriptors`; `control`:
//!   `out_of_range_inflight_area_is_refused`; here `cve_2020_10726_memory_in_flight`
//! * e4a01eea66: `control`: `inflight_region_restores_ring_position`
//! * CVE-2020-14375: `checklist`: `cve_2020_14375_*`; here `cve_2020_14375_descriptors_are_read_once`
//! * CVE-2020-14378: `checklist`: `cve_2020_14378_*`; a packed virtqueue has no such index
//! * CVE-2022-2132: `checklist`: `cve_2022_2132_*`; here `cve_2022_2132_no_packet_behind_the_header`
//! * CVE-2024-11614: here `cve_2024_11614_checksum_beyond_packet`
//! * 285e6b8b18: `checklist`: `fix_285e6b8b18_*`; `pair`: `header_changes_after_check_are_ignored`
//! * e31b57e732: here `fix_e31b57e732_packed_chain_length`
//! * 7023f3e532: here `fix_7023f3e532_segments_of_0_bytes`
//! * 6ec1778134: `checklist`: `fix_6ec1778134_*`; here `fix_6ec1778134_circle`
//! * 7cc4f260bf: `control`: `start_errors_name_the_cause`
//! * 73ea44370d, 21d9fb6bad: here `fix_73ea44370d_front_ends_come_and_go`
//! * 1846fe767f: `checklist`: `fix_1846fe767f_*`; here `fix_1846fe767f_addresses_after_stop`
//!
//! The second list is by the findings of a review of this project:
//!
//! * address space: `control`: `guest_memory_per_port_is_limited`
//! * SIGBUS: `vanish`: all tests; offcore-mem `sigbus`: `truncated_pages_share_one_mapping`
//! * slow memory: offcore-vhost `backend::memory`: `memory_on_unknown_file_systems_is_refused`
//! * blocking eventfds: offcore-vhost `eventfd`: `full_eventfd_does_not_block`; `backend`:
//!   `full_error_eventfd_does_not_block`
//! * work amplification: offcore-port `offload_fallback`: `a_packet_becomes_256_segments_at_most`; `checklist`:
//!   `fix_6ec1778134_empty_buffers_count`
//! * runt frames: offcore-mem `segments`: `short_packets_are_padded`
//! * VLAN hopping, FDB: offcore-flow `bridge`: `vlans_do_not_mix`; `fdb`: `port_keeps_to_its_fdb_share`
//! * control plane: `control`: `messages_are_rate_limited`; `live_script`: unread replies, eventfds, truncated
//!   files
//! * permission to connect: offcore-vhost `connection`: `socket_has_configured_owner_and_mode`; `control`:
//!   `back_end_of_other_user_is_refused`

use std::os::fd::AsFd;

use offcore_ring::RingError;
use offcore_ring::split::{VIRTQ_DESC_F_NEXT, VIRTQ_DESC_F_WRITE};
use offcore_vhost::message::{LogArea, Request, VringState};

use crate::live::{BUFFERS, EVERYTHING, LOG, Live, MEMORY, PATHS, PHYSICAL, SIZE};

/// Guest address of the first buffer.
const BUFFER: u64 = PHYSICAL + BUFFERS;

/// Runs a test on every path and with both formats. Afterwards, everything works, and the neighbour has received all of
/// its packets.
fn rows(mut row: impl FnMut(&mut Live)) {
    let mut live = Live::new();
    for path in PATHS {
        for packed in [false, true] {
            live.begin(path, packed);
            live.start(EVERYTHING);
            row(&mut live);
            live.finish();
        }
    }
}

/// Lets the worker run until the hostile guest's packets and invalid chains reach these numbers.
fn counts(live: &mut Live, packets: usize, dropped: usize) {
    live.until("the hostile guest's chains", |live| live.counts() == (packets, dropped));
    assert_eq!(live.broken(1), None);
}

/// Sends a message with any code and payload. The guest's memory is passed as often as a message may have files. The
/// message is refused, and `finish` checks that no file is left open.
fn refused(live: &mut Live, code: u32, payload: &[u8]) {
    let memory = live.memory.try_clone().unwrap();
    let header = [code, 1, payload.len() as u32].map(u32::to_ne_bytes).concat();
    let before = live.backend.device().status().refused;
    live.connection.as_ref().unwrap().send(&[&header, payload].concat(), &[memory.as_fd(); 8]).unwrap();
    live.until("the message is refused", |live| live.backend.device().status().refused > before);
}

/// Makes a TX chain of one buffer available, with this header and a frame of 100 bytes.
fn send(live: &mut Live, at: u64, header: [u8; 12]) {
    live.write(BUFFERS + at, &[&header[..], &[2; 12], &[8, 0, 0x45], &[0; 85]].concat());
    live.offer(1, SIZE, &[(BUFFER + at, 112, 0)]);
}

#[test]
fn cve_2018_1059_ranges() {
    for (addr, len) in
        [(PHYSICAL + MEMORY - 50, 100), (PHYSICAL - 1, 60), (u64::MAX - 50, 100), (BUFFER, u32::MAX)]
    {
        rows(|live| {
            for (queue, flags) in [(0, VIRTQ_DESC_F_WRITE), (1, 0)] {
                live.offer(queue, SIZE, &[(addr, len, flags)]);
            }
            live.partner.send(60);
            live.until("both virtqueues break", |live| [0, 1].iter().all(|&q| live.broken(q).is_some()));
            for queue in [0, 1] {
                assert!(
                    matches!(live.broken(queue), Some(RingError::Address { .. })),
                    "{:?}",
                    live.broken(queue)
                );
            }
        });
    }
}

/// SET_VRING_NUM and an unknown message, each with unexpected files.
#[test]
fn cve_2019_14818_files_with_any_message() {
    for code in [8, 200] {
        rows(|live| refused(live, code, &[0; 8]));
    }
}

#[test]
fn cve_2020_10722_log_that_wraps_around() {
    for (size, offset) in [(u64::MAX, LOG), (LOG, u64::MAX - LOG + 1)] {
        rows(|live| {
            let log = live.log();
            live.send(Request::SetLogBase(LogArea { size, offset }, log.as_fd()), false);
            drop(log);
            live.until("the connection ends", |live| !live.backend.device().status().connected);
        });
    }
}

/// Truncated to 16 or 8 bits, each of these indices is a running virtqueue.
#[test]
fn cve_2020_10723_index_of_32_bits() {
    rows(|live| {
        for index in [0x100, 0x1_0000, 0x1_0001, 0x8000_0001] {
            assert_ne!(live.ask(Request::SetVringNum(VringState { index, num: 8 })), 0);
            assert_ne!(live.ask(Request::SetVringEnable(VringState { index, num: 0 })), 0);
        }
        send(live, 0, [0; 12]);
        counts(live, 1, 0);
    });
}

/// GET_INFLIGHT_FD and SET_INFLIGHT_FD with 65535 virtqueues, and with files that would be kept open.
#[test]
fn cve_2020_10726_memory_in_flight() {
    for code in [31, 32] {
        rows(|live| {
            let area = [[0xff; 8], [0; 8], [0xff, 0xff, 0, 1, 0, 0, 0, 0]].concat();
            refused(live, code, &area);
        });
    }
}

#[test]
fn cve_2020_10725_empty_buffers() {
    rows(|live| {
        live.offer(1, SIZE, &[(u64::MAX, 0, 0)]);
        live.offer(1, SIZE, &[(0, 0, 0), (BUFFER, 72, 0), (PHYSICAL + MEMORY, 0, 0)]);
        counts(live, 1, 1);
    });
}

#[test]
fn cve_2020_14375_descriptors_are_read_once() {
    rows(|live| {
        send(live, 0, [0; 12]);
        // The chain is taken. Unless the core copies at once, it is not copied yet.
        live.turn();
        let (flags, at) = (0, 0x1_0000);
        live.descriptor(at, u64::MAX, u32::MAX, flags, 9);
        live.until("the packet", |live| live.partner.latest.len() == 100);
        assert_eq!(live.partner.latest[..12], [2; 12]);
    });
}

#[test]
fn cve_2022_2132_no_packet_behind_the_header() {
    rows(|live| {
        for len in [1, 11, 12, 13, 25] {
            live.offer(1, SIZE, &[(BUFFER, len, 0)]);
        }
        counts(live, 0, 5);
        // The header in single bytes, with no data after it.
        let pieces: Vec<_> = (0..8).map(|i| (BUFFER + i, 1, 0)).collect();
        live.offer(1, SIZE, &pieces);
        counts(live, 0, 6);
    });
}

/// With negotiated checksums: a packet whose checksum cannot be computed is dropped on every path.
#[test]
fn cve_2024_11614_checksum_beyond_packet() {
    rows(|live| {
        let starts = [99u16, 100, 0x7fff, 0xffff];
        for (i, start) in starts.into_iter().enumerate() {
            let [low, high] = start.to_le_bytes();
            send(live, i as u64 * 4096, [1, 0, 0, 0, 0, 0, low, high, 6, 0, 0, 0]);
        }
        counts(live, 0, starts.len());
        // A valid request.
        send(live, 0, [1, 0, 0, 0, 0, 0, 14, 0, 6, 0, 0, 0]);
        counts(live, 1, starts.len());
    });
}

/// With negotiated segmentation: segments of 0 bytes, and kinds that were not negotiated.
#[test]
fn fix_7023f3e532_segments_of_0_bytes() {
    rows(|live| {
        for (i, (kind, size)) in
            [(1, 0), (4, 0), (0x81, 0), (3, 100), (5, 0), (0x85, 100)].into_iter().enumerate()
        {
            send(live, i as u64 * 4096, [1, kind, 54, 0, size, 0, 34, 0, 16, 0, 0, 0]);
        }
        counts(live, 0, 6);
    });
}

/// The longest possible chain, and a chain that continues after it.
#[test]
fn fix_e31b57e732_packed_chain_length() {
    for endless in [false, true] {
        rows(|live| {
            let flags = if endless { VIRTQ_DESC_F_NEXT } else { 0 };
            let chain: Vec<_> = (0..SIZE).map(|i| (BUFFER + u64::from(i) * 16, 16, flags)).collect();
            live.offer(1, SIZE, &chain);
            if endless {
                live.until("the virtqueue breaks", |live| live.broken(1).is_some());
            } else {
                counts(live, 1, 0);
            }
        });
    }
}

#[test]
fn fix_6ec1778134_circle() {
    rows(|live| {
        // Only in a split virtqueue, a descriptor refers to the next one. In a packed one, the chain wraps around the
        // ring.
        if live.packed {
            for i in 0..SIZE {
                live.descriptor(0x1_0000 + u64::from(i) * 16, BUFFER, 1, VIRTQ_DESC_F_NEXT | 1 << 7, 0);
            }
        } else {
            live.offer(1, SIZE, &[(BUFFER, 1, 0)]);
            live.descriptor(0x1_0000, BUFFER, 1, VIRTQ_DESC_F_NEXT, 0);
        }
        live.until("the virtqueue breaks", |live| live.broken(1).is_some());
    });
}

/// Connections that end at any time, with packets in flight. The next front end is served.
#[test]
fn fix_73ea44370d_front_ends_come_and_go() {
    rows(|live| {
        for round in 0..5 {
            for i in 0..round {
                send(live, i * 4096, [0; 12]);
            }
            live.turn();
            live.reboot();
            live.start(EVERYTHING);
        }
    });
}

#[test]
fn fix_1846fe767f_addresses_after_stop() {
    rows(|live| {
        send(live, 0, [0; 12]);
        counts(live, 1, 0);
        live.until("its chain is back", |live| live.returned(1) == 1);
        for index in 0..2 {
            live.ask(Request::GetVringBase(VringState { index, num: 0 }));
        }
        live.offer(0, SIZE, &[(BUFFER + 8192, 2048, VIRTQ_DESC_F_WRITE)]);
        send(live, 4096, [0; 12]);
        live.partner.send(60);
        for _ in 0..10 {
            live.turn();
            live.stepper.step();
        }
        assert_eq!((live.counts().0, live.returned(1), live.returned(0)), (1, 1, 0));
        // Later kicks and calls do not start anything either.
        let memory = live.memory.try_clone().unwrap();
        assert_eq!(live.ask(Request::SetMemTable(vec![(live.region(), memory.as_fd())])), 0);
        live.turn();
        assert_eq!((live.returned(1), live.returned(0)), (1, 0));
    });
}
