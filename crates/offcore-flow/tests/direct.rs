//! A switch with packets in device memory: DPDK receives them there, the device processes them, and DPDK sends them.
#![cfg(feature = "dpdk")]
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use offcore_flow::SwitchConfig;
use offcore_flow::switch::{Devices, Run, Working, Workload, start, start_with};
use offcore_gpu::device::{Launch, Memory};
use offcore_gpu::host::HostDevice;
use offcore_gpu::layout::Kind;
use offcore_mem::{DeviceMemory, Hugepages, Pool};
use offcore_port::Port;
use offcore_port::dpdk::DpdkPort;
use offcore_port::generator::GenPort;
use offcore_port::spec::PortSpec;
use offcore_stats::lcore;

const PACKETS: usize = 5000;
/// Bytes of a capture file's header, and of a packet's header.
const HEADERS: [usize; 2] = [24, 16];

fn content(number: usize) -> Vec<u8> {
    (0..60 + number * 7 % 1400).map(|at| (number * 31 + at * 13) as u8).collect()
}

fn words(words: [u32; 4]) -> impl Iterator<Item = u8> {
    words.into_iter().flat_map(u32::to_le_bytes)
}

fn write_capture(path: &Path) {
    let mut file: Vec<u8> = words([0xa1b2_c3d4, 4 << 16 | 2, 0, 0]).collect();
    file.extend([65_535, 1u32].iter().flat_map(|word| word.to_le_bytes()));
    for number in 0..PACKETS {
        let bytes = content(number);
        file.extend(words([0, 0, bytes.len() as u32, bytes.len() as u32]));
        file.extend(bytes);
    }
    std::fs::write(path, file).unwrap();
}

fn read_capture(path: &Path) -> Vec<Vec<u8>> {
    let file = std::fs::read(path).unwrap();
    let (mut at, mut packets) = (HEADERS[0], Vec::new());
    while at < file.len() {
        let len = u32::from_le_bytes(file[at + 8..at + 12].try_into().unwrap()) as usize;
        packets.push(file[at + HEADERS[1]..][..len].to_vec());
        at += HEADERS[1] + len;
    }
    packets
}

fn file(name: &str) -> PathBuf {
    std::env::temp_dir().join(format!("offcore-flow-direct-{}-{name}.pcap", std::process::id()))
}

fn config(launch: Launch) -> SwitchConfig {
    let working = Working {
        workload: Workload::Device(launch),
        devices: vec!["host".into()],
        memory: Memory::Direct,
        // All packets fit, so none are dropped.
        slots: 128,
        kind: Kind::Crc32c,
        timeout: Duration::from_secs(10),
        hugepages: Hugepages::None,
        ..Working::default()
    };
    let mut lcores = lcore::available().unwrap();
    lcores.truncate(1);
    SwitchConfig { run: Run::Pipelines(working), lcores, ..SwitchConfig::default() }
}

fn dpdk(spec: &str, pool: &'static Pool, memory: Option<&DeviceMemory>) -> Box<dyn Port> {
    let Ok(PortSpec::Dpdk(spec)) = spec.parse() else { panic!("{spec} is no port of DPDK") };
    Box::new(DpdkPort::open(&spec, pool, memory).unwrap())
}

#[test]
fn direct_packets_bypass_the_pool() {
    if HostDevice::new().is_err() {
        println!("SKIP: no C++ compiler was there when offcore-gpu was built");
        return;
    }
    for (index, launch) in Launch::ALL.into_iter().enumerate() {
        let pool = Pool::new(8192, 2048, Hugepages::None).unwrap();
        let config = config(launch);
        let devices = Devices::open(&config, pool).unwrap();
        let [from, to] = ["from", "to"].map(|name| file(&format!("{launch}-{name}")));
        write_capture(&from);
        let spec = format!("dpdk:net_pcap{index},args=[rx_pcap={},tx_pcap={}]", from.display(), to.display());
        let ports = vec![dpdk(&spec, pool, devices.memory())];
        let mut running = start_with(&config, ports, pool, devices).unwrap();
        let note = "packets are received there and processed there";
        assert!(running.notes().iter().any(|text| text.contains(note)), "{:?}", running.notes());
        let (mut reporter, since) = (running.reporter().unwrap(), Instant::now());
        loop {
            let report = reporter.report("test").unwrap();
            let sent =
                report.queues.iter().find(|queue| queue.port == "port0" && queue.half == "tx").unwrap();
            if sent.packets >= PACKETS as u64 {
                break;
            }
            assert!(
                since.elapsed() < Duration::from_secs(10),
                "{} packets after 10 s: {report:?}",
                sent.packets
            );
            std::thread::sleep(Duration::from_millis(5));
        }
        let work = reporter.report("test").unwrap().work;
        assert!(work.len() == 1 && work[0].hits == PACKETS as u64 && !work[0].failed, "{work:?}");
        assert_eq!(running.stop(), 0);
        drop(running);
        let sent = read_capture(&to);
        assert_eq!(sent.len(), PACKETS);
        for (number, packet) in sent.iter().enumerate() {
            let mut expected = content(number);
            expected[..12].rotate_left(6);
            assert_eq!(*packet, expected, "{launch}: packet {number}");
        }
        let (base, len) = pool.memory();
        for place in (0..len).step_by(64) {
            // SAFETY: the 64 bytes at `place` are inside the pool's memory, and nothing uses it after `running` was
            // dropped.
            let own = unsafe { base.add(place).cast::<[u8; 64]>().read() };
            assert_eq!(own, [0; 64], "{launch}: the pool has something at {place}");
        }
        let mut cache = pool.cache();
        let all: Vec<_> = std::iter::from_fn(|| cache.take()).collect();
        assert_eq!(all.len(), pool.chunks(), "packet buffers were lost");
        cache.free_all(all);
        [from, to].iter().for_each(|file| std::fs::remove_file(file).unwrap());
    }
}

#[test]
fn ports_without_direct_memory_are_refused() {
    if HostDevice::new().is_err() {
        return;
    }
    let pool = Pool::new(4096, 2048, Hugepages::None).unwrap();
    let config = config(Launch::Kernel);
    let Ok(PortSpec::Gen(spec)) = "gen:size=64".parse() else { panic!("no generator") };
    let devices = Devices::open(&config, pool).unwrap();
    let ports: Vec<Box<dyn Port>> = vec![Box::new(GenPort::open(&spec, pool).unwrap())];
    let error = start_with(&config, ports, pool, devices).unwrap_err().to_string();
    assert!(error.contains("gen:") && error.contains("memory of host"), "{error}");
    // The right kind of port, but opened without the device memory.
    let ports = vec![dpdk("dpdk:net_null0", pool, None)];
    let error = start(&config, ports, pool).unwrap_err().to_string();
    assert!(error.contains("net_null0 are elsewhere"), "{error}");
}
