//! Names of requests.

use std::fmt;

/// The number of a front end's request. Any number can come; the ones known to the protocol have names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Code(pub u32);

/// Defines the constants that we use and the names of all of the protocol's requests, with one line each.
macro_rules! codes {
    ($($(#[doc = $doc:literal] $constant:ident)? = $number:literal $name:literal;)*) => {
        impl Code {
            $($(#[doc = $doc] pub const $constant: Self = Self($number);)?)*

            /// The request's name in the specification, without the prefix VHOST_USER_.
            pub fn name(self) -> Option<&'static str> {
                match self.0 {
                    $($number => Some($name),)*
                    _ => None,
                }
            }
        }
    };
}

codes! {
    /// Ask for the virtio features.
    GET_FEATURES = 1 "GET_FEATURES";
    /// Choose virtio features.
    SET_FEATURES = 2 "SET_FEATURES";
    /// Begin a session.
    SET_OWNER = 3 "SET_OWNER";
    /// Deprecated.
    RESET_OWNER = 4 "RESET_OWNER";
    /// Describe the guest's memory.
    SET_MEM_TABLE = 5 "SET_MEM_TABLE";
    = 6 "SET_LOG_BASE";
    = 7 "SET_LOG_FD";
    /// Set a virtqueue's size.
    SET_VRING_NUM = 8 "SET_VRING_NUM";
    /// Set a virtqueue's addresses.
    SET_VRING_ADDR = 9 "SET_VRING_ADDR";
    /// Set a virtqueue's base.
    SET_VRING_BASE = 10 "SET_VRING_BASE";
    /// Stop a virtqueue and ask for its base.
    GET_VRING_BASE = 11 "GET_VRING_BASE";
    /// Set a virtqueue's kick eventfd, and start it.
    SET_VRING_KICK = 12 "SET_VRING_KICK";
    /// Set a virtqueue's call eventfd.
    SET_VRING_CALL = 13 "SET_VRING_CALL";
    /// Set a virtqueue's error eventfd.
    SET_VRING_ERR = 14 "SET_VRING_ERR";
    /// Ask for the protocol features.
    GET_PROTOCOL_FEATURES = 15 "GET_PROTOCOL_FEATURES";
    /// Choose protocol features.
    SET_PROTOCOL_FEATURES = 16 "SET_PROTOCOL_FEATURES";
    /// Ask for the number of queue pairs.
    GET_QUEUE_NUM = 17 "GET_QUEUE_NUM";
    /// Enable or disable a virtqueue.
    SET_VRING_ENABLE = 18 "SET_VRING_ENABLE";
    = 19 "SEND_RARP";
    /// Tell the MTU.
    NET_SET_MTU = 20 "NET_SET_MTU";
    /// Give a socket for requests of the back end.
    SET_BACKEND_REQ_FD = 21 "SET_BACKEND_REQ_FD";
    = 22 "IOTLB_MSG";
    = 23 "SET_VRING_ENDIAN";
    = 24 "GET_CONFIG";
    = 25 "SET_CONFIG";
    = 26 "CREATE_CRYPTO_SESSION";
    = 27 "CLOSE_CRYPTO_SESSION";
    = 28 "POSTCOPY_ADVISE";
    = 29 "POSTCOPY_LISTEN";
    = 30 "POSTCOPY_END";
    = 31 "GET_INFLIGHT_FD";
    = 32 "SET_INFLIGHT_FD";
    = 33 "GPU_SET_SOCKET";
    /// Reset the device.
    RESET_DEVICE = 34 "RESET_DEVICE";
    = 35 "VRING_KICK";
    /// Ask how many regions of memory there may be.
    GET_MAX_MEM_SLOTS = 36 "GET_MAX_MEM_SLOTS";
    /// Add a region of memory.
    ADD_MEM_REG = 37 "ADD_MEM_REG";
    /// Remove a region of memory.
    REM_MEM_REG = 38 "REM_MEM_REG";
    /// Tell the virtio device status.
    SET_STATUS = 39 "SET_STATUS";
    /// Ask for the virtio device status.
    GET_STATUS = 40 "GET_STATUS";
    = 41 "GET_SHARED_OBJECT";
    = 42 "SET_DEVICE_STATE_FD";
    = 43 "CHECK_DEVICE_STATE";
    = 44 "GET_SHMEM_CONFIG";
}

impl Code {
    /// Whether the request has a reply of its own, for which a front end waits in any case. Such a request cannot be
    /// refused by an acknowledgement.
    pub fn is_answered(self) -> bool {
        matches!(self.0, 1 | 11 | 15 | 17 | 24 | 26 | 28 | 30 | 31 | 36 | 40..=44)
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
