//! Tests of the guests' checks with a scripted device.

use super::*;
use offcore_mem::GuestMemory;
use offcore_mem::testing::guest_memory;
use offcore_ring::device::{self, Buffer, DeviceQueue};
use offcore_ring::testing::single;
use offcore_ring::with_queue;
use offcore_vhost::features::NET_HEADER;
use offcore_vhost::frontend::ring_areas;
use offcore_wire::template::UDP_HEADERS_LEN;

use crate::guests::workload::Workload;
use crate::method::temperature::STRIDE;

const BUFFERS: usize = 512;
const RING: u16 = 256;
const WINDOW: usize = 64;

/// A guest that sends to itself, and a device that copies with deliberate errors.
struct Looped {
    guests: Guests,
    memory: Arc<GuestMemory>,
    rx: device::RingDevice,
    tx: device::RingDevice,
}

impl Looped {
    fn new(workload: &Workload) -> Self {
        let temperature = workload.temperature;
        let buffers = if temperature == Temperature::Cold { BUFFERS } else { temperature.buffers() };
        let memory = guest_memory(2 * buffers * STRIDE + (1 << 16));
        let traffic = Traffic::over(&memory, &memory, workload, buffers).unwrap();
        let ring = |index| {
            let areas = ring_areas((2 * buffers * STRIDE) as u64, index, RING, false);
            Layout::in_memory(&memory, areas, RING.into(), false).unwrap()
        };
        let guests = Guests::new(&Arc::new(Mutex::new(traffic)), ring(0), ring(1), 0);
        let [rx, tx] =
            [ring(0), ring(1)].map(|layout| device::RingDevice::new(layout, 0, false, false).unwrap());
        Self { guests, memory, rx, tx }
    }

    /// Transfers a window of packets. `spoil` gets each arriving packet and the previous content of its buffer.
    fn window(&mut self, spoil: impl Fn(&mut [u8], &[u8])) -> Result<()> {
        self.guests.transmit(WINDOW)?;
        let Self { memory, rx, tx, .. } = self;
        let mapping = memory.regions()[0].mapping();
        let offset = |buffer: &Buffer| buffer.addr.as_ptr() as usize - mapping.base().as_ptr() as usize;
        for _ in 0..WINDOW {
            let [mut packet, mut before] = [[0; BUFFER]; 2];
            let len = with_queue!(&mut *tx, queue => {
                queue.look(1)?;
                let (buffer, chain) =
                    single(queue, 0, memory, Direction::Readable).context("one buffer")?;
                mapping.read_at(offset(&buffer), &mut packet[..buffer.len as usize]);
                queue.push_used(chain, 0);
                queue.consume(1);
                queue.publish();
                buffer.len as usize
            });
            // `num_buffers` is 1.
            packet[NET_HEADER - 2] = 1;
            packet[NET_HEADER..NET_HEADER + 6].copy_from_slice(&PEER_MAC.0); // copy-ok: a test
            packet[NET_HEADER + 6..NET_HEADER + 12].copy_from_slice(&PORT_MAC.0); // copy-ok: a test
            with_queue!(&mut *rx, queue => {
                queue.look(1)?;
                let (buffer, chain) =
                    single(queue, 0, memory, Direction::Writable).context("one buffer")?;
                mapping.read_at(offset(&buffer), &mut before);
                spoil(&mut packet[..len], &before[..len]);
                mapping.write_at(offset(&buffer), &packet[..len]);
                queue.push_used(chain, len as u32);
                queue.consume(1);
                queue.publish();
            });
        }
        self.guests.collect()
    }
}

/// Passes over all buffers, so that each has held a correct packet once.
fn passed(temperature: Temperature) -> Looped {
    let mut looped = Looped::new(&Workload::table8(temperature, 512));
    for _ in 0..3 * BUFFERS / WINDOW {
        looped.window(|_, _| ()).unwrap();
    }
    let seen = looped.guests.seen();
    assert_eq!((seen.received, seen.verified), (seen.sent, seen.sent));
    assert!(looped.guests.ticks() > 0);
    looped
}

#[test]
fn uncopied_packet_is_noticed() {
    for temperature in [Temperature::Remote, Temperature::Cold] {
        // The packet is not written, so that the buffer still holds an earlier packet.
        let error = passed(temperature).window(|packet, before| packet.clone_from_slice(before));
        let error = format!("{:#}", error.unwrap_err());
        assert!(error.contains("where") && error.contains("was due"), "{temperature}: {error}");
    }
}

#[test]
fn a_byte_is_noticed_on_every_pass() {
    for temperature in [Temperature::Remote, Temperature::Cold] {
        // The last cache line of each packet keeps the content of an earlier packet.
        let error = passed(temperature).window(|packet, before| {
            let from = packet.len() - 64;
            packet[from..].copy_from_slice(&before[from..]); // copy-ok: a test
        });
        let error = format!("{:#}", error.unwrap_err());
        assert!(error.contains("content changed"), "{temperature}: {error}");
        let error = passed(temperature).window(|packet, _| packet[300] ^= 1).unwrap_err();
        assert!(format!("{error:#}").contains("byte 288"), "{temperature}: {error:#}");
    }
}

#[test]
fn every_byte_of_the_headers_is_checked() {
    for guest in GuestKind::ALL {
        // Short enough for a single buffer.
        let workload = Workload { guest, ..Workload::table8(Temperature::Remote, 128) };
        for at in 0..NET_HEADER + UDP_HEADERS_LEN {
            let mut looped = Looped::new(&workload);
            looped.window(|_, _| ()).unwrap_or_else(|error| panic!("{guest}: {error:#}"));
            let error = looped.window(|packet, _| packet[at] ^= 1);
            assert!(error.is_err(), "{guest}: byte {at} may be anything");
        }
        // Errors in the virtio-net header are named.
        let error = Looped::new(&workload).window(|packet, _| packet[6] ^= 1).unwrap_err();
        assert!(format!("{error:#}").contains("byte 6 of its virtio-net header"), "{error:#}");
    }
}
