//! Datagrams that come back (RFC 862), or go away (RFC 863).

use offcore_session::Datagrams;
use offcore_session::datagram::Header;
use offcore_tcp::proto::{AppId, CallError, ConnId};

use crate::host::Calls;

/// Bytes of the longest datagram.
const LONGEST: usize = 65_535;

/// Ports of services that answer whatever comes: active users, daytime, quote of the day, character generator, time, DNS and
/// NTP. One datagram that pretends to be of theirs would go back and forth for ever (CERT CA-1996-01).
const ANSWERING: [u16; 8] = [7, 11, 13, 17, 19, 37, 53, 123];
/// What a datagram counts as, beside its bytes.
const COST: usize = 256;

/// Bytes read and written, and whether there is more to take.
pub(super) struct Served {
    pub(super) read: u64,
    pub(super) written: u64,
    pub(super) more: bool,
}

/// Takes all datagrams to a port.
#[derive(Debug)]
pub(super) struct DatagramService {
    pub(super) socket: ConnId,
    datagrams: Datagrams,
    port: u16,
    echo: bool,
    bytes: Box<[u8]>,
}

impl DatagramService {
    /// Datagrams to `port` of all addresses, which come back when that is `echo`.
    ///
    /// # Errors
    /// What the stack refuses.
    pub(super) fn open(port: u16, echo: bool, calls: &mut Calls<'_>) -> Result<Self, CallError> {
        let socket = calls.stack.open_datagrams(AppId::OWN, None, port)?;
        let slot = calls.stack.slot(socket).ok_or(CallError::Gone)?;
        let datagrams = Datagrams::new(calls.stack.memory(AppId::OWN), slot).ok_or(CallError::Gone)?;
        Ok(Self { socket, datagrams, port, echo, bytes: vec![0; LONGEST].into_boxed_slice() })
    }

    /// Takes what has come, and its bytes off `budget`.
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
            // Where there is no room the datagram is lost, as datagrams are.
            if self.echo && self.may_answer(peer.port()) && self.answer(&Header::new(len, peer, local), calls)
            {
                served.written += u64::from(len);
            }
        }
        let _ = calls.stack.consumed(calls.now, self.socket, calls.out);
        served
    }

    /// Sends a datagram back. After a failed write the stack makes room.
    fn answer(&mut self, header: &Header, calls: &mut Calls<'_>) -> bool {
        let Self { datagrams, bytes, socket, .. } = self;
        let payload = &bytes[..header.len.into()];
        datagrams.send(header, payload)
            || calls.stack.written(calls.now, *socket, calls.out).is_ok() && datagrams.send(header, payload)
    }

    /// Whether what listens at a peer's port does not answer answers.
    fn may_answer(&self, port: u16) -> bool {
        port != self.port && !ANSWERING.contains(&port)
    }
}
