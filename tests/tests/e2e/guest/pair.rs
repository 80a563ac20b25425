//! Two QEMU guests on two vhost ports of one switch.

use peers::{Guest, GuestConfig, Need, Nic, Offcore, TempDir, exclusive};

use super::offloads::{FRAME, fresh_report, mean_length, set_offloads};
use crate::switch::{self, Copies, full, stop_with_log};

/// The ring layout of a guest, and whether checksums and segmentation are offloaded.
#[derive(Clone, Copy, Debug)]
pub(super) struct Side {
    pub(super) packed: bool,
    pub(super) offloads: bool,
}

impl Side {
    fn boot(self, dir: &TempDir, number: usize) -> Guest {
        let Self { packed, offloads } = self;
        let nic = Nic::new(socket(dir, number), &mac(number), &format!("{}/24", address(number)));
        let nics = vec![Nic { packed, offloads, ..nic }];
        Guest::spawn(&GuestConfig { core: Some(number), nics, ..GuestConfig::default() }).unwrap()
    }
}

fn socket(dir: &TempDir, number: usize) -> std::path::PathBuf {
    dir.file(&format!("g{number}"))
}

fn mac(number: usize) -> String {
    format!("52:54:00:00:01:0{number}")
}

fn address(number: usize) -> String {
    format!("10.77.1.1{number}")
}

/// Sends small and large pings. The large ones have six fragments. A guest may answer too late for `ping`, as in
/// `super`.
fn ping(guests: &mut [Guest; 2]) {
    for size in ["56", "8000"] {
        for (from, guest) in guests.iter_mut().enumerate() {
            let command = format!("ping -A -c3 -W5 -s {size} {}", address(1 - from));
            let mut complete = || guest.run(&command).unwrap().text.contains(" 0% packet loss");
            assert!((0..4).any(|_| complete()), "no complete round of {size}-byte pings from guest {from}");
        }
    }
}

/// Runs a TCP stream from one guest to the other.
fn stream(guests: &mut [Guest; 2], from: usize) {
    let time = if full() { 20 } else { 1 };
    let to = address(1 - from);
    // The server may still be busy with the previous stream, and then refuses the next one.
    let command = format!(
        "for i in $(seq 12); do iperf3 -J -c {to} -t {time} >/tmp/report && break; sleep 0.3; done; cat /tmp/report"
    );
    let text = guests[from].check(&command).unwrap();
    let report: serde_json::Value = serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e}: {text}"));
    let bytes = report["end"]["sum_received"]["bytes"].as_u64().unwrap_or_default();
    assert!(report["error"].is_null() && bytes > 100_000, "{bytes} bytes arrived: {report:#}");
}

/// Runs a stream in each direction. `long` says for each guest whether it sends, and whether it receives, packets
/// longer than the MTU allows.
fn assert_streams(offcore: &mut Offcore, guests: &mut [Guest; 2], long: [bool; 2]) {
    for from in [0, 1] {
        let to = 1 - from;
        let before = fresh_report(offcore);
        stream(guests, from);
        let after = fresh_report(offcore);
        let (sent, received) =
            (mean_length(&before, &after, from, "rx"), mean_length(&before, &after, to, "tx"));
        assert_eq!(sent > FRAME, long[from], "guest {from} sent packets of {sent} bytes: {after}");
        let both = long[from] && long[to];
        assert_eq!(received > FRAME, both, "guest {to} received packets of {received} bytes: {after}");
    }
}

/// Upper limit for packets of a run that are no longer than the head and therefore not copied. These are a few ARP
/// packets.
const ALL_HEAD: u64 = 64;

fn guest_to_guest(sides: [Side; 2], copies: Copies) {
    let Some(_alone) = exclusive(&[Need::Root, Need::Guest, Need::Cores(2)]) else { return };
    let dir = TempDir::new().unwrap();
    let ports = [0, 1].map(|number| format!("vhost:{}", socket(&dir, number).display()));
    // Each core runs a guest, so the switch sleeps when it is idle.
    let mut offcore = switch::start(&ports, copies, 1, switch::idle());
    switch::wait_for_report(&mut offcore);
    let mut guests = [0, 1].map(|number| sides[number].boot(&dir, number));
    for guest in &mut guests {
        guest.wait_ready().unwrap();
        guest.start_iperf3_server().unwrap();
    }
    for (port, side) in sides.iter().enumerate() {
        let features = switch::latest(&offcore).features(port);
        assert_eq!(
            features & switch::VIRTIO_F_RING_PACKED != 0,
            side.packed,
            "features of guest {port}: {features:#x}"
        );
    }

    ping(&mut guests);
    // Only packets that arrived before both guests were up with buffers were dropped. All pings are answered.
    let drops = ["port0 tx full", "port0 tx down", "port1 tx full", "port1 tx down"];
    switch::latest(&offcore).assert_only_drops(&drops);
    assert_streams(&mut offcore, &mut guests, sides.map(|side| side.offloads));
    if sides.iter().any(|side| side.offloads) {
        for (guest, side) in guests.iter_mut().zip(sides) {
            if side.offloads {
                set_offloads(guest, "eth0", false);
            }
        }
        ping(&mut guests);
        assert_streams(&mut offcore, &mut guests, [false, false]);
    }

    let (report, _) = stop_with_log(offcore);
    report.assert_only_drops(&drops);
    report
        .assert_copies(copies, (report.packets(0, "rx") + report.packets(1, "rx")).saturating_sub(ALL_HEAD));
}

const SPLIT: Side = Side { packed: false, offloads: false };
const PACKED: Side = Side { packed: true, offloads: false };

tests! {
    fn guests_with_offloads() =>
        guest_to_guest([Side { offloads: true, ..SPLIT }, Side { offloads: true, ..PACKED }], Copies::Core);
    /// The switch performs the offloads of one guest for the other guest.
    fn a_guest_with_offloads_and_one_without() =>
        guest_to_guest([Side { offloads: true, ..PACKED }, SPLIT], Copies::Helper);
}

#[test]
fn guests_without_offloads() {
    guest_to_guest([SPLIT, PACKED], Copies::Helper);
    if full() {
        guest_to_guest([SPLIT, SPLIT], Copies::Core);
        guest_to_guest([PACKED, PACKED], Copies::Core);
    }
}
