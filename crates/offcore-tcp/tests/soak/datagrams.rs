//! Datagrams between both hosts, many of them fragmented. They may be lost or duplicated, but never corrupted.

use offcore_session::datagram::Header;
use offcore_stats::SplitMix;
use offcore_stats::time::Time;
use offcore_tcp::proto::{AppId, ConnId};

use crate::end::End;
use crate::session::byte;

const PORT: u16 = 9;
/// Average number of rounds between two datagrams.
const EVERY: u64 = 10;
/// Maximum length of the data, and length of the key before it.
const LONGEST: u64 = 9000;
const KEY: usize = 8;

#[derive(Debug)]
pub(crate) struct Datagrams {
    sockets: Vec<(ConnId, offcore_session::Datagrams)>,
    /// Number of sent datagrams, and of received ones that were fragmented.
    pub(crate) sent: u64,
    pub(crate) whole: u64,
    chance: SplitMix,
    bytes: Vec<u8>,
}

impl Datagrams {
    pub(crate) fn open(seed: u64, ends: &mut [End; 2]) -> Self {
        let sockets = ends.iter_mut().map(|end| {
            let stack = &mut end.path.stack;
            let socket = stack.open_datagrams(AppId::OWN, None, PORT).unwrap();
            let memory = stack.memory(AppId::OWN);
            (socket, offcore_session::Datagrams::new(memory, stack.slot(socket).unwrap()).unwrap())
        });
        let sockets = sockets.collect();
        Self { sockets, sent: 0, whole: 0, chance: SplitMix::new(seed ^ 0xda7a), bytes: vec![0; 65_535] }
    }

    /// Sends a datagram occasionally, and checks all received ones.
    pub(crate) fn round(&mut self, now: Time, ends: [&mut End; 2], sends: bool) {
        for (index, (end, (socket, datagrams))) in ends.into_iter().zip(&mut self.sockets).enumerate() {
            let (stack, out) = end.path.call();
            let mut read = false;
            while let Some(header) = datagrams.receive(&mut self.bytes) {
                let got = &self.bytes[..header.len.into()];
                let (key, rest) = got.split_first_chunk::<KEY>().unwrap();
                let key = u64::from_le_bytes(*key);
                assert!(rest.iter().zip(0..).all(|(got, at)| *got == byte(key, at)), "{header:?}");
                assert_eq!(key % LONGEST, rest.len() as u64);
                self.whole += u64::from(rest.len() > 2000);
                read = true;
            }
            if read {
                let _ = stack.consumed(now, *socket, out);
            }
            if sends && self.chance.below(EVERY) == 0 {
                let key = self.chance.next();
                let rest = (0..key % LONGEST).map(|at| byte(key, at));
                let bytes: Vec<u8> = key.to_le_bytes().into_iter().chain(rest).collect();
                let other = 2 - index as u16;
                let (peer, local) = match key >> 63 {
                    0 => (([10, 0, 0, other as u8], PORT).into(), [0; 4].into()),
                    _ => (([0x2001, 0xdb8, 0, 0, 0, 0, 0, other], PORT).into(), [0u16; 8].into()),
                };
                self.sent += u64::from(datagrams.send(&Header::new(bytes.len() as u16, peer, local), &bytes));
                stack.written(now, *socket, out).unwrap();
            }
        }
    }

    pub(crate) fn close(&mut self, now: Time, ends: &mut [End; 2]) {
        for (end, (socket, _)) in ends.iter_mut().zip(self.sockets.drain(..)) {
            let (stack, out) = end.path.call();
            stack.close(now, socket, out);
        }
    }
}
