//! Datagram services: echo (RFC 862) and discard (RFC 863).

use offcore_session::Datagrams;
use offcore_session::datagram::Header;
use offcore_tcp::proto::{AppId, CallError, ConnId};

use crate::host::Calls;

/// Bytes of the longest datagram.
const LONGEST: usize = 65_535;

/// Ports of services that answer every datagram: echo, active users, daytime, quote of the day, character generator,
/// time, DNS and NTP. One datagram with such a forged source port would bounce back and forth forever (CERT
/// CA-1996-01).
const ANSWERING: [u16; 8] = [7, 11, 13, 17, 19, 37, 53, 123];
/// The cost of a datagram in the budget, in addition to its length.
const COST: usize = 256;

/// Bytes read and written, and whether more datagrams are waiting.
pub(super) struct Served {
    pub(super) read: u64,
    pub(super) written: u64,
    pub(super) more: bool,
}

/// Receives all datagrams to a port.
#[derive(Debug)]
pub(super) struct DatagramService {
    pub(super) socket: ConnId,
    datagrams: Datagrams,
    port: u16,
    echo: bool,
    bytes: Box<[u8]>,
}

impl DatagramService {
    /// Opens a socket for datagrams to `port` of all addresses. With `echo` they are sent back.
    ///
    /// # Errors
    /// Returns the error of a call that the stack refuses.
    pub(super) fn open(port: u16, echo: bool, calls: &mut Calls<'_>) -> Result<Self, CallError> {
        let socket = calls.stack.open_datagrams(AppId::OWN, None, port)?;
        let slot = calls.stack.slot(socket).ok_or(CallError::Gone)?;
        let datagrams = Datagrams::new(calls.stack.memory(AppId::OWN), slot).ok_or(CallError::Gone)?;
        Ok(Self { socket, datagrams, port, echo, bytes: vec![0; LONGEST].into_boxed_slice() })
    }

    /// Receives waiting datagrams until `budget` is used up, and deducts their cost.
    pub(super) fn serve(&mut self, calls: &mut Calls<'_>, budget: &mut usize) -> Served {
        let mut served = Served { read: 0, written: 0, more: true };
        while *budget > 0 {
            let Some(header) = self.datagrams.receive(&mut self.bytes) else {
                served.more = false;
                break;
            };
            let Header { len, peer, local, .. } = header;
            *budget = budget.saturating_sub(usize::from(len) + COST);
            served.read += u64::from(len);
            // If the FIFO is full, the answer is lost, as UDP permits.
            if self.echo && self.may_answer(peer.port()) && self.answer(&Header::new(len, peer, local), calls)
            {
                served.written += u64::from(len);
            }
        }
        let _ = calls.stack.consumed(calls.now, self.socket, calls.out);
        served
    }

    /// Sends a datagram back. If the first attempt fails, the stack makes room for a second one.
    fn answer(&mut self, header: &Header, calls: &mut Calls<'_>) -> bool {
        let Self { datagrams, bytes, socket, .. } = self;
        let payload = &bytes[..header.len.into()];
        datagrams.send(header, payload)
            || calls.stack.written(calls.now, *socket, calls.out).is_ok() && datagrams.send(header, payload)
    }

    /// Whether a datagram from a peer's port may be answered. Services that answer every datagram get no answer.
    fn may_answer(&self, port: u16) -> bool {
        port != self.port && !ANSWERING.contains(&port)
    }
}
