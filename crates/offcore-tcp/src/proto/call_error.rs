//! Why calls are refused.

/// Why a call was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, displaydoc::Display, thiserror::Error)]
pub enum CallError {
    /// no route to the address
    NoRoute,
    /// whether our own address is somebody else's, too, is not known yet
    Tentative,
    /// the address is not one of this stack's
    NotOurs,
    /// the address and port are in use
    InUse,
    /// every port that could be chosen is in use
    NoPort,
    /// there are as many connections as may be
    TooMany,
    /// another worker receives what comes for these addresses and ports
    Elsewhere,
    /// the connection is gone
    Gone,
    /// there is no such application, or it is gone
    NoApp,
    /// the connection's stream has been ended, or is not open yet
    NotOpen,
    /// an index of the application's end means nothing
    Misuse,
}
