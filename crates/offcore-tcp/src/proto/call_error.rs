//! Why calls are refused.

/// Why a call was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, displaydoc::Display, thiserror::Error)]
pub enum CallError {
    /// no route to the address
    NoRoute,
    /// duplicate address detection for the own address has not finished
    Tentative,
    /// the stack does not have this address
    NotOurs,
    /// the address and port are in use
    InUse,
    /// all ephemeral ports are in use
    NoPort,
    /// the maximum number of connections is open
    TooMany,
    /// packets for these addresses and ports arrive at another worker
    Elsewhere,
    /// the connection has ended
    Gone,
    /// no such application
    NoApp,
    /// the connection's stream has ended or is not open yet
    NotOpen,
    /// an index from the application is out of range
    Misuse,
}
