//! dpdk-testpmd at the other end returns frames of 9000 bytes unchanged.

use super::*;

/// Arguments for frames of several packet buffers: the maximum length, transmission in segments, and scattered
/// reception, which the driver of a front end requires.
const ARGS: [&str; 3] = ["--max-pkt-len=9018", "--tx-offloads=0x8000", "--enable-scatter"];
/// Minimum number of frames that return.
const BACK: u64 = 5_000;

/// The rate is low enough for testpmd, which drops packets when its ring is full.
const SOURCE: &str = "gen:size=9018,rate=5000";

fn config(config: TestpmdConfig, args: &[&str]) -> TestpmdConfig {
    let args = args.iter().map(|&arg| arg.into()).collect();
    TestpmdConfig { args, mbufs: 16_384, memory_mb: 256, ..config }
}

/// Asserts that the frames returned as they were sent.
fn assert_back(report: &Report, what: &str) {
    let found = report.generator(1);
    assert!(found.received >= BACK, "{what}: {report}");
    assert_eq!((found.verified, found.wrong), (found.received, 0), "{what}: {report}");
    assert_eq!(report.bytes(1, "tx"), found.received * 9014, "{what}: {report}");
}

/// Offcore's virtio-user port on testpmd's back end.
#[test]
fn jumbo_frames_to_its_back_end() {
    let Some(_cores) = exclusive(&[Need::Testpmd, Need::Cores(2)]) else { return };
    for options in ["", ",packed", ",offloads=off", ",mrg=off,mtu=9000,offloads=off"] {
        let dir = TempDir::new().unwrap();
        let back_end = NetVhost::new(dir.file("s"));
        let mut testpmd =
            Testpmd::start(&config(TestpmdConfig::net_vhost(1, &back_end), &ARGS[..2])).unwrap();
        testpmd.set_forward("io").unwrap();
        testpmd.start_forwarding().unwrap();
        let port = format!("virtio-user:{},queue_size=1024{options}", dir.file("s").display());
        let mut offcore = switch::start(&[&port, SOURCE], Copies::Core, 1, &[]);
        switch::wait_for_packets(&mut offcore, 1, "tx", BACK);
        assert_back(&switch::stop(offcore), options);
        testpmd.quit().unwrap();
    }
}

/// testpmd's front end on Offcore's vhost port.
#[test]
fn jumbo_frames_to_its_front_end() {
    let Some(_cores) = exclusive(&[Need::Testpmd, Need::Cores(2)]) else { return };
    for (packed_vq, copies) in [(false, Copies::Core), (true, Copies::Core), (false, Copies::Helper)] {
        let dir = TempDir::new().unwrap();
        let port = format!("vhost:{}", dir.file("s").display());
        let mut offcore = switch::start(&[&port, SOURCE], copies, 1, &[]);
        switch::wait_for_report(&mut offcore);
        let front_end = VirtioUser { packed_vq, queue_size: 1024, ..VirtioUser::new(dir.file("s")) };
        let mut testpmd = Testpmd::start(&config(TestpmdConfig::virtio_user(1, &front_end), &ARGS)).unwrap();
        testpmd.set_forward("io").unwrap();
        testpmd.start_forwarding().unwrap();
        switch::wait_for_packets(&mut offcore, 1, "tx", BACK);
        testpmd.quit().unwrap();
        assert_back(&switch::stop(offcore), "vhost");
    }
}
