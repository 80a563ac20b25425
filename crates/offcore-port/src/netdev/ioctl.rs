//! ioctl requests about one interface, by name: netdevice(7) and ethtool.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use offcore_wire::ethernet::MacAddr;

use super::Channels;

/// Creates a request about interface `name`. A name that is too long is truncated; the callers check the length.
pub(crate) fn interface_request(name: &str) -> libc::ifreq {
    // SAFETY: `ifreq` consists of integers, pointers and arrays of them, for which zeros are a valid value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    let room = request.ifr_name.len() - 1;
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes().take(room)) {
        *to = from.cast_signed();
    }
    request
}

/// Performs an ioctl that reads and writes `argument`.
///
/// # Safety
/// `argument` must be of the type that `code` takes.
pub(crate) unsafe fn ioctl<T>(file: &OwnedFd, code: libc::Ioctl, argument: &mut T) -> io::Result<()> {
    // SAFETY: `argument` is live and writable for the call, and has the type that the kernel expects for `code`.
    match unsafe { libc::ioctl(file.as_raw_fd(), code, std::ptr::from_mut(argument)) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Performs an interface request. `code` must be a request that takes an `ifreq`.
fn ask(control: &OwnedFd, code: libc::Ioctl, name: &str) -> io::Result<libc::ifreq> {
    let mut request = interface_request(name);
    if name.is_empty() || name.len() >= request.ifr_name.len() {
        return Err(io::Error::from_raw_os_error(libc::ENODEV));
    }
    // SAFETY: All callers pass SIOCGIF* codes, which take an `ifreq`.
    unsafe { ioctl(control, code, &mut request) }?;
    Ok(request)
}

pub(super) fn index(control: &OwnedFd, name: &str) -> io::Result<u32> {
    let request = ask(control, libc::SIOCGIFINDEX, name)?;
    // SAFETY: SIOCGIFINDEX has filled this member of the union.
    let index = unsafe { request.ifr_ifru.ifru_ifindex };
    u32::try_from(index).map_err(|_| io::ErrorKind::InvalidData.into())
}

pub(super) fn mtu(control: &OwnedFd, name: &str) -> io::Result<usize> {
    let request = ask(control, libc::SIOCGIFMTU, name)?;
    // SAFETY: SIOCGIFMTU has filled this member of the union.
    let mtu = unsafe { request.ifr_ifru.ifru_mtu };
    usize::try_from(mtu).map_err(|_| io::ErrorKind::InvalidData.into())
}

/// Returns the hardware type (ARPHRD_*) and the hardware address of the interface.
pub(super) fn hardware(control: &OwnedFd, name: &str) -> io::Result<(u16, MacAddr)> {
    let request = ask(control, libc::SIOCGIFHWADDR, name)?;
    // SAFETY: SIOCGIFHWADDR has filled this member of the union.
    let address = unsafe { request.ifr_ifru.ifru_hwaddr };
    Ok((address.sa_family, MacAddr(std::array::from_fn(|i| address.sa_data[i].cast_unsigned()))))
}

pub(super) fn flags(control: &OwnedFd, name: &str) -> io::Result<libc::c_int> {
    let request = ask(control, libc::SIOCGIFFLAGS, name)?;
    // SAFETY: SIOCGIFFLAGS has filled this member of the union.
    Ok(unsafe { request.ifr_ifru.ifru_flags }.into())
}

pub(super) fn set_up(control: &OwnedFd, name: &str) -> io::Result<()> {
    let mut request = ask(control, libc::SIOCGIFFLAGS, name)?;
    // SAFETY: SIOCGIFFLAGS has filled this member of the union.
    let flags = unsafe { request.ifr_ifru.ifru_flags };
    #[allow(clippy::cast_possible_truncation, reason = "IFF_UP is 1")]
    let up = libc::IFF_UP as libc::c_short;
    // SIOCSIFFLAGS requires CAP_NET_ADMIN even if it changes nothing.
    if flags & up != 0 {
        return Ok(());
    }
    request.ifr_ifru.ifru_flags = flags | up;
    // SAFETY: SIOCSIFFLAGS takes an `ifreq`.
    unsafe { ioctl(control, libc::SIOCSIFFLAGS, &mut request) }
}

pub(super) fn set_mtu(control: &OwnedFd, name: &str, mtu: u16) -> io::Result<()> {
    let mut request = interface_request(name);
    request.ifr_ifru.ifru_mtu = mtu.into();
    // SAFETY: SIOCSIFMTU takes an `ifreq`.
    unsafe { ioctl(control, libc::SIOCSIFMTU, &mut request) }
}

/// Sets the hardware address of an Ethernet interface.
pub(super) fn set_mac(control: &OwnedFd, name: &str, mac: MacAddr) -> io::Result<()> {
    let mut request = ask(control, libc::SIOCGIFHWADDR, name)?;
    // SAFETY: SIOCGIFHWADDR has filled this member of the union.
    let mut address = unsafe { request.ifr_ifru.ifru_hwaddr };
    for (to, from) in address.sa_data.iter_mut().zip(mac.0) {
        *to = from.cast_signed();
    }
    request.ifr_ifru.ifru_hwaddr = address;
    // SAFETY: SIOCSIFHWADDR takes an `ifreq`.
    unsafe { ioctl(control, libc::SIOCSIFHWADDR, &mut request) }
}

/// Structures of linux/ethtool.h. The first field of each is the command that fills the structure.
mod ethtool {
    pub(super) const GSET: u32 = 0x01;
    pub(super) const GDRVINFO: u32 = 0x03;
    pub(super) const GCHANNELS: u32 = 0x3c;

    /// `struct ethtool_cmd`.
    #[repr(C)]
    #[derive(Default)]
    pub(super) struct Settings {
        pub(super) command: u32,
        pub(super) modes: [u32; 2],
        pub(super) speed: u16,
        pub(super) bytes: [u8; 6],
        pub(super) packets: [u32; 2],
        pub(super) speed_high: u16,
        pub(super) more: [u8; 2],
        pub(super) rest: [u32; 3],
    }

    /// `struct ethtool_drvinfo`.
    #[repr(C)]
    #[derive(Default)]
    pub(super) struct DriverInfo {
        pub(super) command: u32,
        pub(super) driver: [u8; 32],
        pub(super) versions: [[u8; 32]; 2],
        pub(super) bus: [u8; 32],
        pub(super) rest: [[u8; 32]; 2],
    }

    /// `struct ethtool_channels`: the maximum numbers, then the numbers in use.
    #[repr(C)]
    #[derive(Default)]
    pub(super) struct Channels {
        pub(super) command: u32,
        pub(super) max: [u32; 4],
        pub(super) rx: u32,
        pub(super) tx: u32,
        pub(super) other: u32,
        pub(super) combined: u32,
    }

    const _: () = assert!(size_of::<Settings>() == 44);
    const _: () = assert!(size_of::<DriverInfo>() == 196);
    const _: () = assert!(size_of::<Channels>() == 36);
}

/// Fills `answer`, whose first field is the command. Returns `None` if the driver does not support the command.
///
/// # Safety
/// `T` must be the structure that its command fills, with at least the size that it has in linux/ethtool.h.
unsafe fn ask_ethtool<T>(control: &OwnedFd, name: &str, answer: &mut T) -> Option<()> {
    let mut request = interface_request(name);
    request.ifr_ifru.ifru_data = std::ptr::from_mut(answer).cast();
    // SAFETY: SIOCETHTOOL takes an `ifreq` with the address of the command's structure, which is live for the call.
    unsafe { ioctl(control, libc::SIOCETHTOOL, &mut request) }.ok()
}

/// Returns the driver's name and the device's bus address.
pub(super) fn driver(control: &OwnedFd, name: &str) -> Option<(String, String)> {
    let mut info = ethtool::DriverInfo { command: ethtool::GDRVINFO, ..Default::default() };
    // SAFETY: GDRVINFO fills an ethtool_drvinfo.
    unsafe { ask_ethtool(control, name, &mut info) }?;
    Some((text(&info.driver), text(&info.bus)))
}

pub(super) fn channels(control: &OwnedFd, name: &str) -> Option<Channels> {
    let mut channels = ethtool::Channels { command: ethtool::GCHANNELS, ..Default::default() };
    // SAFETY: GCHANNELS fills an ethtool_channels.
    unsafe { ask_ethtool(control, name, &mut channels) }?;
    let ethtool::Channels { combined, rx, tx, .. } = channels;
    Some(Channels { combined, rx, tx })
}

/// Returns the link speed in Mbit/s.
pub(super) fn speed(control: &OwnedFd, name: &str) -> Option<u32> {
    let mut settings = ethtool::Settings { command: ethtool::GSET, ..Default::default() };
    // SAFETY: GSET fills an ethtool_cmd.
    unsafe { ask_ethtool(control, name, &mut settings) }?;
    let speed = u32::from(settings.speed_high) << 16 | u32::from(settings.speed);
    // All ones mean that the speed is unknown.
    (speed != 0 && speed != u32::MAX && speed != u32::from(u16::MAX)).then_some(speed)
}

fn text(field: &[u8]) -> String {
    let end = field.iter().position(|&b| b == 0).unwrap_or(field.len());
    String::from_utf8_lossy(&field[..end]).into_owned()
}
