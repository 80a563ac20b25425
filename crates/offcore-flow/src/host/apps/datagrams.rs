//! Datagrams that come back (RFC 862), or go away (RFC 863).

use offcore_session::datagram::{Datagrams, Header};
use offcore_tcp::proto::{CallError, ConnId};

use crate::host::Calls;

/// Bytes of the longest datagram.
const LONGEST: usize = 65_535;

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
        let socket = calls.stack.open_datagrams(None, port)?;
        let slot = calls.stack.slot(socket).ok_or(CallError::Gone)?;
        let datagrams = Datagrams::new(calls.stack.memory(), slot).ok_or(CallError::Gone)?;
        Ok(Self { socket, datagrams, port, echo, bytes: vec![0; LONGEST].into_boxed_slice() })
    }

    /// Takes all that have come. Bytes read and written.
    pub(super) fn serve(&mut self, calls: &mut Calls<'_>) -> (u64, u64) {
        let (mut read, mut written) = (0, 0);
        while let Some(header) = self.datagrams.receive(&mut self.bytes) {
            let Header { len, peer, .. } = header;
            read += u64::from(len);
            // Two echoes would never stop. Where there is no room the datagram is lost, as datagrams are.
            if self.echo
                && peer.port() != self.port
                && self.datagrams.send(&header, &self.bytes[..len.into()])
            {
                written += u64::from(len);
            }
        }
        let _ = calls.stack.consumed(calls.now, self.socket, calls.out);
        (read, written)
    }
}
