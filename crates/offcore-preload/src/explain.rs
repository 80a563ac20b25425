//! Prints a line for each socket that says whether the socket uses the stack or the kernel, and why
//! (`offcore exec -v`).

use core::fmt::{self, Write};
use core::net::SocketAddr;

use crate::environment;
use crate::report;
use crate::sys;
use crate::table::SocketKind;

/// Maximum length of a line in bytes.
const LONGEST: usize = 256;

/// The decision on a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SocketDecision {
    Stack,
    /// A listener at all addresses uses both.
    Both,
    Kernel(&'static str),
    /// The call fails.
    Nowhere(&'static str),
}

/// A line. Text that does not fit is cut.
struct Line {
    bytes: [u8; LONGEST],
    len: usize,
}

impl Write for Line {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for (to, from) in self.bytes[self.len..].iter_mut().zip(text.bytes()) {
            *to = from;
            self.len += 1;
        }
        Ok(())
    }
}

impl Line {
    fn new(pid: u32, call: &str, kind: SocketKind, address: SocketAddr, goes: SocketDecision) -> Self {
        let mut line = Self { bytes: [0; LONGEST], len: 0 };
        let protocol = if kind == SocketKind::OpenDatagrams { "udp" } else { "tcp" };
        let _ = write!(line, "offcore[{pid}]: {call} {protocol} {address}: ");
        let _ = match goes {
            SocketDecision::Stack => line.write_str("stack\n"),
            SocketDecision::Both => line.write_str("stack, and kernel (all addresses)\n"),
            SocketDecision::Kernel(why) => writeln!(line, "kernel ({why})"),
            SocketDecision::Nowhere(why) => writeln!(line, "fails ({why})"),
        };
        line
    }

    fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

/// Prints the decision on a socket, if `-v` was given.
pub(crate) fn say(call: &str, kind: SocketKind, address: SocketAddr, goes: SocketDecision) {
    if environment::prints_decisions() {
        report::print(&[Line::new(sys::pid(), call, kind, address, goes).as_bytes()]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn explain_lines_name_destination() {
        let line = |kind, address: &str, goes| {
            let line = Line::new(7, "connect", kind, address.parse().unwrap(), goes);
            String::from_utf8(line.as_bytes().to_vec()).unwrap()
        };
        let (tcp, udp) = (SocketKind::OpenStream, SocketKind::OpenDatagrams);
        assert_eq!(
            line(tcp, "10.0.0.1:80", SocketDecision::Stack),
            "offcore[7]: connect tcp 10.0.0.1:80: stack\n"
        );
        assert_eq!(
            line(udp, "[::1]:53", SocketDecision::Kernel("loopback")),
            "offcore[7]: connect udp [::1]:53: kernel (loopback)\n"
        );
        assert!(
            line(tcp, "[::]:80", SocketDecision::Both).ends_with(": stack, and kernel (all addresses)\n")
        );
    }

    #[test]
    fn overlong_line_is_truncated() {
        let mut line = Line { bytes: [0; LONGEST], len: 0 };
        for _ in 0..2 * LONGEST {
            line.write_str("ab").unwrap();
        }
        assert_eq!(line.as_bytes(), "ab".repeat(LONGEST / 2).as_bytes());
    }
}
