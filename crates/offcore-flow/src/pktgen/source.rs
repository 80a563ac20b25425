//! Generated packets: headers, a stamp and content that can be verified.

use offcore_mem::{HEADROOM, Packet, PoolCache};
use offcore_wire::Sum;
use offcore_wire::ethernet::FCS_LEN;
use offcore_wire::stamp::{self, CONTENTS, STAMP_LEN, Stamp};
use offcore_wire::traffic::HeaderTemplate;

use super::sizes::{Draw, MAX_SIZE, Sizes};

/// Maximum number of flows.
pub const MAX_FLOWS: u32 = 1 << 16;

/// Generates the packets of one direction.
#[derive(Debug)]
pub(super) struct Source {
    template: HeaderTemplate,
    stream: u16,
    seed: u64,
    contents: Contents,
    draw: Draw,
    /// The next packet's flow.
    flow: u32,
    flows: u32,
    /// The next number of every flow that was ever used.
    numbers: Box<[u64]>,
    /// The size of a packet that found no free buffer.
    drawn: Option<usize>,
}

impl Source {
    pub(super) fn new(template: HeaderTemplate, stream: u16, seed: u64, sizes: &Sizes, flows: u32) -> Self {
        let contents = Contents::new(stream, template.sums_payload());
        Self {
            template,
            stream,
            seed,
            contents,
            draw: Draw::new(sizes, seed),
            flow: 0,
            flows,
            numbers: vec![0; MAX_FLOWS as usize].into(),
            drawn: None,
        }
    }

    /// Sets the sizes and the number of flows of further packets.
    pub(super) fn set(&mut self, sizes: &Sizes, flows: u32) {
        self.draw = Draw::new(sizes, self.seed);
        self.drawn = None;
        self.flows = flows.clamp(1, MAX_FLOWS);
        if self.flow >= self.flows {
            self.flow = 0;
        }
    }

    /// Returns the next packet, due at `due`, and its size, including the FCS. `None` if the pool is empty.
    #[inline]
    pub(super) fn make(&mut self, cache: &mut PoolCache, due: u64) -> Option<(Packet, usize)> {
        let size = self.drawn.take().unwrap_or_else(|| self.draw.size());
        let len = size - FCS_LEN;
        let Some(mut packet) = cache.take_chain(HEADROOM, len) else {
            self.drawn = Some(size);
            return None;
        };
        let number = &mut self.numbers[self.flow as usize];
        let stamp = Stamp { stream: self.stream, flow: self.flow as u16, number: *number as u32, due };
        *number += 1;
        let at = self.template.len();
        let fields = stamp.to_bytes(len - at);
        let kind = stamp.content();
        let content = self.contents.of(kind, len - at - STAMP_LEN);
        let sum = match self.template.sums_payload() {
            true => Sum::of(&fields) + self.contents.sum(kind, content.len()),
            false => Sum::ZERO,
        };
        let frame = packet.bytes_mut();
        self.template.write(frame, self.flow, stamp.number, len, sum);
        // copy-ok: a generator writes its packets; these bytes are not forwarded
        frame[at..at + STAMP_LEN].copy_from_slice(&fields);
        let first = &mut frame[at + STAMP_LEN..];
        let (here, rest) = content.split_at(first.len());
        // copy-ok: as above
        first.copy_from_slice(here);
        if !rest.is_empty() {
            fill_rest(&mut packet, cache, rest);
        }
        self.flow = if self.flow + 1 >= self.flows { 0 } else { self.flow + 1 };
        Some((packet, size))
    }
}

/// Writes the content of a packet's further buffers.
#[cold]
fn fill_rest(packet: &mut Packet, cache: &PoolCache, mut content: &[u8]) {
    for segment in cache.pool().segments_mut(packet).skip(1) {
        let (here, rest) = content.split_at(segment.len());
        // copy-ok: a generator writes its packets
        segment.copy_from_slice(here);
        content = rest;
    }
}

/// All kinds of content, each as long as the longest packet.
#[derive(Debug)]
struct Contents {
    bytes: Box<[u8]>,
    /// For each kind, the sums of its first 0, 2, 4... bytes. Empty if no checksum covers the content.
    sums: Box<[Sum]>,
}

impl Contents {
    const LEN: usize = MAX_SIZE;
    const SUMS: usize = Self::LEN / 2 + 1;

    fn new(stream: u16, sums: bool) -> Self {
        let mut bytes = vec![0; Self::LEN * CONTENTS as usize];
        for (kind, content) in (0..CONTENTS).zip(bytes.chunks_exact_mut(Self::LEN)) {
            stamp::write_content(stream, kind, content);
        }
        let mut all = Vec::new();
        for content in bytes.chunks_exact(Self::LEN).filter(|_| sums) {
            let mut sum = Sum::ZERO;
            all.push(sum);
            all.extend(content.as_chunks::<2>().0.iter().map(|word| {
                sum = sum + Sum::of(word);
                sum
            }));
        }
        Self { bytes: bytes.into(), sums: all.into() }
    }

    #[inline]
    fn of(&self, kind: u32, len: usize) -> &[u8] {
        let start = kind as usize * Self::LEN;
        &self.bytes[start..start + len]
    }

    #[inline]
    fn sum(&self, kind: u32, len: usize) -> Sum {
        let even = self.sums[kind as usize * Self::SUMS + len / 2];
        match len % 2 {
            0 => even,
            _ => even + Sum::of(&self.of(kind, len)[len - 1..]),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use offcore_mem::{Hugepages, Pool};
    use offcore_wire::traffic::{Traffic, Transport, Vary};
    use offcore_wire::{MacAddr, TcpSegment};

    use super::*;

    fn template(transport: Transport) -> HeaderTemplate {
        let traffic = Traffic {
            src_mac: MacAddr::local(1),
            dst_mac: MacAddr::local(2),
            vlan: None,
            src_ip: IpAddr::from([10, 0, 0, 1]),
            dst_ip: IpAddr::from([10, 0, 0, 2]),
            transport,
            src_port: 1000,
            dst_port: 2000,
            vary: Vary { src_port: true, ..Vary::default() },
        };
        HeaderTemplate::new(&traffic).unwrap()
    }

    #[test]
    fn generated_packets_are_valid() {
        let pool = Pool::new(256, 2048, Hugepages::None).unwrap();
        let mut cache = pool.cache();
        let sizes: Sizes = "80,81,1518,1519,9018,65535".parse().unwrap();
        let mut source = Source::new(template(Transport::Tcp), 77, 1, &sizes, 3);
        for index in 0..60u32 {
            let (packet, size) = source.make(&mut cache, 1_000_000 + u64::from(index)).unwrap();
            let len = size - 4;
            assert_eq!(pool.total_len(&packet), len);
            let whole: Vec<u8> = pool.segments(&packet).flatten().copied().collect();
            let found = stamp::find(packet.bytes(), len, 77).unwrap();
            assert_eq!((u32::from(found.stamp.flow), found.stamp.number), (index % 3, index / 3));
            assert_eq!(found.stamp.due, 1_000_000 + u64::from(index));
            assert!(stamp::is_intact(&found, pool.segments(&packet)), "{size}");
            let tcp = TcpSegment::new_checked(&whole[34..]).unwrap();
            assert!(tcp.verify_checksum_v4([10, 0, 0, 1].into(), [10, 0, 0, 2].into()), "{size}");
            assert_eq!(u32::from(tcp.src_port()), 1000 + index % 3);
            cache.free(packet);
        }
    }

    #[test]
    fn exhausted_pool_skips_no_number() {
        let pool = Pool::new(64, 2048, Hugepages::None).unwrap();
        let mut cache = pool.cache();
        let mut source = Source::new(template(Transport::Udp), 7, 1, &"64-1518".parse().unwrap(), 1);
        let mut same = Source::new(template(Transport::Udp), 7, 1, &"64-1518".parse().unwrap(), 1);
        let mut held = Vec::new();
        while let Some((packet, size)) = source.make(&mut cache, 0) {
            held.push((packet, size));
        }
        let before = held.len() as u32;
        let mut sizes: Vec<_> = held.iter().map(|(_, size)| *size).collect();
        assert!(source.make(&mut cache, 0).is_none());
        cache.free_all(held.drain(..).map(|(packet, _)| packet));
        let (packet, size) = source.make(&mut cache, 0).unwrap();
        sizes.push(size);
        assert_eq!(stamp::find(packet.bytes(), size - 4, 7).unwrap().stamp.number, before);
        cache.free(packet);
        for size in sizes {
            let (packet, same) = same.make(&mut cache, 0).unwrap();
            assert_eq!(size, same);
            cache.free(packet);
        }
    }
}
