//! The far end of an interface that `offcore` uses as a port. Tests send frames there, and receive and check frames.

use anyhow::{Context, Result, ensure};
use offcore_bench::peer::frames::FrameSink;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{SendFlags, send, sockopt};

use crate::netns::Netns;

/// Maximum number of bytes that may wait to be received.
const WAITING: usize = 64 << 20;
/// The longest frame, without FCS.
const LONGEST: usize = 65_536;

/// A packet socket on an interface.
#[derive(Debug)]
pub struct Wire {
    socket: FrameSink,
    room: Vec<u8>,
}

impl Wire {
    /// Opens a socket on an interface in a namespace.
    ///
    /// # Errors
    /// If the interface does not exist, or the kernel refuses access: this requires root.
    pub fn open(netns: &Netns, interface: &str) -> Result<Self> {
        let shown = netns.ip(&["-o", "link", "show", "dev", interface])?;
        let index = shown.split(':').next().and_then(|index| index.trim().parse().ok());
        let index = index.with_context(|| format!("no index of {interface} in {shown:?}"))?;
        let socket = netns.within(|| FrameSink::new(index))?;
        sockopt::set_socket_recv_buffer_size_force(&socket, WAITING)
            .context("making room for received frames")?;
        Ok(Self { socket, room: vec![0; LONGEST] })
    }

    /// Sends a frame, without FCS.
    ///
    /// # Errors
    /// System errors, and if the frame was truncated.
    pub fn send(&self, frame: &[u8]) -> Result<()> {
        let sent = send(&self.socket, frame, SendFlags::empty()).context("sending a frame")?;
        ensure!(sent == frame.len(), "{sent} bytes of {} were sent", frame.len());
        Ok(())
    }

    /// Returns the next received frame, if any.
    ///
    /// # Errors
    /// System errors.
    pub fn receive(&mut self) -> Result<Option<&[u8]>> {
        self.socket.next(&mut self.room).context("receiving a frame")
    }

    /// Waits until a frame has arrived at any of `wires`, or until the timeout in milliseconds.
    ///
    /// # Errors
    /// System errors.
    pub fn wait(wires: &[Self], milliseconds: i64) -> Result<()> {
        let mut fds: Vec<_> = wires.iter().map(|wire| PollFd::new(&wire.socket, PollFlags::IN)).collect();
        let timeout = Timespec { tv_sec: 0, tv_nsec: milliseconds * 1_000_000 };
        poll(&mut fds, Some(&timeout)).context("waiting for frames")?;
        Ok(())
    }
}
