//! Checks the tables of options in `docs/exec.md` by trying every option in the kernel's headers.

use std::collections::BTreeMap;
use std::fs;

use core::ffi::c_int;

use libc::{
    IPPROTO_IP as IP, IPPROTO_IPV6 as IPV6, IPPROTO_TCP as TCP, IPPROTO_UDP as UDP, SOL_SOCKET as SOCKET,
    socklen_t,
};

use crate::datagram_options;
use crate::memberships::MEMBERSHIPS;
use crate::stream_options::{EFFECTIVE, Fresh, SWITCHES, check};
use crate::sys::{self, Errno};

const DOCS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/exec.md");
/// Prefixes of constants in the headers that are not options.
const OTHER_NAMES: [&str; 14] = [
    "IPV6_FL_",
    "IP_PMTUDISC_",
    "IP_DEFAULT_",
    "IP_MAX_",
    "IPV6_PMTUDISC_",
    "IPV6_TLV_",
    "IPV6_PREFER_",
    "IPV6_PRIORITY_",
    "IPV6_FLOWINFO_",
    "TCP_MSS_",
    "TCP_REPAIR_O",
    "TCP_AO_",
    "TCP_MD5SIG_MAXKEYLEN",
    "UDP_ENCAP_",
];

/// Returns the options that a header of Linux defines: level, name and number.
fn options(header: &str, prefixes: &[(&str, c_int)]) -> Vec<(c_int, String, c_int)> {
    let text = fs::read_to_string(format!("/usr/include/{header}")).unwrap();
    let define = |line: &str| {
        let mut words = line.strip_prefix("#define")?.split_whitespace();
        let (name, number) = (words.next()?, words.next()?.parse().ok()?);
        let (_, level) = prefixes.iter().find(|(prefix, _)| name.starts_with(prefix))?;
        let other = OTHER_NAMES.iter().any(|other| name.starts_with(other)) && name != "IPV6_FLOWINFO_SEND";
        (!other).then(|| (*level, name.to_owned(), number))
    };
    let found: Vec<_> = text.lines().filter_map(define).collect();
    assert!(found.len() > 5, "{header}: {found:?}");
    found
}

/// A kind of socket with its own section in the documentation.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Tcp,
    Udp,
}

impl Kind {
    fn fresh(self, level: c_int) -> Fresh {
        let made =
            if self == Self::Tcp { Fresh::new(level == IPV6) } else { Fresh::datagrams(level == IPV6) };
        made.unwrap()
    }

    fn section(self) -> &'static str {
        if self == Self::Tcp { "## Options of TCP sockets" } else { "## Options of UDP sockets" }
    }

    /// Tries to set an option to a value other than its default.
    fn tried(self, level: c_int, name: c_int) -> Result<(), Errno> {
        if self == Self::Udp && MEMBERSHIPS.iter().any(|(l, n, _)| (*l, *n) == (level, name)) {
            return Ok(());
        }
        let fresh = self.fresh(level);
        let value: c_int = match (level, name) {
            (TCP, libc::TCP_MAXSEG) => 1000,
            (IP, libc::IP_MTU_DISCOVER) | (IPV6, libc::IPV6_MTU_DISCOVER) => libc::IP_PMTUDISC_DO,
            // This stands for any interface.
            (IP, libc::IP_MULTICAST_IF) => 0,
            _ if sys::int_option(fresh.0, level, name) == 1 => 0,
            _ => 1,
        };
        let (at, len) = ((&raw const value).cast(), size_of::<c_int>());
        // SAFETY: `at` points to `value`, which lives until the calls return, and `len` is its size.
        unsafe {
            match self {
                Self::Tcp => check(level == IPV6, level, name, at, len as socklen_t)?,
                Self::Udp => datagram_options::check(level == IPV6, level, name, at, len as socklen_t)?,
            }
            sys::setsockopt(fresh.0, level, name, at, len).map(drop)
        }
    }

    fn is_without_effect(self, level: c_int, name: c_int) -> bool {
        match self {
            Self::Tcp => SWITCHES[EFFECTIVE..].iter().any(|(l, n, _)| (*l, *n) == (level, name)),
            Self::Udp => datagram_options::WITHOUT_EFFECT.contains(&(level, name)),
        }
    }

    /// Returns the row of the documentation that must list an option.
    fn group(self, level: c_int, name: &str, number: c_int) -> &'static str {
        /// Options whose values are structures.
        const STRUCTURES: [&str; 4] = ["SO_LINGER", "SO_RCVTIMEO", "SO_SNDTIMEO", "TCP_CONGESTION"];
        let fresh = self.fresh(level);
        let reads = sys::socket_option(fresh.0, level, number, 0 as c_int).is_some();
        match self.tried(level, number) {
            _ if self.is_without_effect(level, number) => "Have none",
            _ if STRUCTURES.iter().any(|start| name.starts_with(start)) => "Have their effect",
            Ok(()) => "Have their effect",
            Err(libc::ENOPROTOOPT) if reads && sys::set_int_option(fresh.0, level, number, 1).is_err() => {
                "Can be read"
            }
            Err(_) => "Fail",
        }
    }

    /// Checks that the documentation lists every option of Linux in the right row.
    fn compare(self, own: Vec<(c_int, String, c_int)>) {
        let all = [
            options("asm-generic/socket.h", &[("SO_", SOCKET)]),
            options("linux/in.h", &[("IP_", IP)]),
            options("linux/in6.h", &[("IPV6_", IPV6)]),
            own,
        ];
        let mut rows: BTreeMap<&str, Vec<String>> = BTreeMap::new();
        for (level, name, number) in all.into_iter().flatten() {
            let fresh = self.fresh(level);
            let absent = sys::set_int_option(fresh.0, level, number, 1) == Err(libc::ENOPROTOOPT)
                && sys::socket_option(fresh.0, level, number, 0 as c_int).is_none();
            let group = self.group(level, &name, number);
            // A kernel without the option cannot show whether it is supported.
            if group == "Fail" || !absent {
                rows.entry(group).or_default().push(format!("`{name}`"));
            }
        }
        let docs = fs::read_to_string(DOCS).unwrap();
        let (_, docs) = docs.split_once(self.section()).unwrap_or_default();
        let cell = |group: &str| {
            let row = docs.lines().find(|line| line.starts_with(&format!("| {group} |"))).unwrap_or_default();
            row.rsplit('|').nth(1).unwrap_or_default().split(',').map(str::trim).collect::<Vec<_>>()
        };
        let mut wrong = String::new();
        for (group, names) in rows {
            let mut listed = cell(group);
            if group == "Can be read" || group == "Fail" {
                // Kernels differ in which of these two rows applies.
                listed.extend(cell(if group == "Fail" { "Can be read" } else { "Fail" }));
            }
            if names.iter().any(|name| !listed.contains(&name.as_str())) {
                wrong += &format!("| {group} | {} |\n", names.join(", "));
            }
        }
        assert!(wrong.is_empty(), "docs/exec.md should have these rows below {}:\n{wrong}", self.section());
    }
}

#[test]
fn every_tcp_option_is_documented() {
    Kind::Tcp.compare(options("linux/tcp.h", &[("TCP_", TCP)]));
}

#[test]
fn every_udp_option_is_documented() {
    Kind::Udp.compare(options("linux/udp.h", &[("UDP_", UDP)]));
}
