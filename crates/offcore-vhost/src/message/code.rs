//! Names of requests.

use std::fmt;

/// The number of a front end's request. Any number can be received. Numbers defined by the protocol have names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Code(pub u32);

/// Defines the names of all requests in the protocol, and a constant for each. The constants used by this crate are
/// `pub` and documented at [`Request`](super::Request).
macro_rules! codes {
    ($($vis:vis $name:ident = $number:literal;)*) => {
        impl Code {
            $(#[allow(dead_code, reason = "not a request of ours")] $vis const $name: Self = Self($number);)*

            /// The request's name in the specification, without the prefix VHOST_USER_.
            pub fn name(self) -> Option<&'static str> {
                match self.0 {
                    $($number => Some(stringify!($name)),)*
                    _ => None,
                }
            }
        }
    };
}

codes! {
    pub GET_FEATURES = 1;
    pub SET_FEATURES = 2;
    pub SET_OWNER = 3;
    pub RESET_OWNER = 4;
    pub SET_MEM_TABLE = 5;
    pub SET_LOG_BASE = 6;
    SET_LOG_FD = 7;
    pub SET_VRING_NUM = 8;
    pub SET_VRING_ADDR = 9;
    pub SET_VRING_BASE = 10;
    pub GET_VRING_BASE = 11;
    pub SET_VRING_KICK = 12;
    pub SET_VRING_CALL = 13;
    pub SET_VRING_ERR = 14;
    pub GET_PROTOCOL_FEATURES = 15;
    pub SET_PROTOCOL_FEATURES = 16;
    pub GET_QUEUE_NUM = 17;
    pub SET_VRING_ENABLE = 18;
    SEND_RARP = 19;
    pub NET_SET_MTU = 20;
    pub SET_BACKEND_REQ_FD = 21;
    IOTLB_MSG = 22;
    SET_VRING_ENDIAN = 23;
    GET_CONFIG = 24;
    SET_CONFIG = 25;
    CREATE_CRYPTO_SESSION = 26;
    CLOSE_CRYPTO_SESSION = 27;
    POSTCOPY_ADVISE = 28;
    POSTCOPY_LISTEN = 29;
    POSTCOPY_END = 30;
    pub GET_INFLIGHT_FD = 31;
    pub SET_INFLIGHT_FD = 32;
    GPU_SET_SOCKET = 33;
    pub RESET_DEVICE = 34;
    VRING_KICK = 35;
    pub GET_MAX_MEM_SLOTS = 36;
    pub ADD_MEM_REG = 37;
    pub REM_MEM_REG = 38;
    pub SET_STATUS = 39;
    pub GET_STATUS = 40;
    GET_SHARED_OBJECT = 41;
    SET_DEVICE_STATE_FD = 42;
    CHECK_DEVICE_STATE = 43;
    GET_SHMEM_CONFIG = 44;
}

impl Code {
    /// Whether the request has its own kind of reply, which the front end always waits for. Such a request cannot be
    /// refused by an acknowledgement.
    pub fn is_answered(self) -> bool {
        matches!(self.0, 1 | 6 | 11 | 15 | 17 | 24 | 26 | 28 | 30 | 31 | 36 | 40..=44)
    }
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => f.write_str(name),
            None => write!(f, "request {}", self.0),
        }
    }
}
