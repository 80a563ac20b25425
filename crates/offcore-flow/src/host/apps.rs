//! Small applications: streams of bytes, files by HTTP, and epping.

mod datagrams;
pub mod epping;
pub mod http;
pub mod streams;

use std::path::PathBuf;

use super::App;
use super::serve::ServeConfig;
use epping::EppingConfig;
use http::FileServer;
use streams::{Stream, Streams};

/// What runs on a host.
#[derive(Clone, Debug)]
pub enum Hosted {
    /// What listens at this port of all addresses.
    Service(Service, u16),
    /// What sends.
    Epping(EppingConfig),
    /// Applications in other processes.
    Others(ServeConfig),
}

/// What listens on a host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Service {
    /// Bytes that come back, go away, or never end.
    Stream(Stream),
    /// The files of a directory.
    Http(PathBuf),
}

impl Service {
    /// The application, which will listen at `port` of all addresses.
    ///
    /// # Errors
    /// A directory that cannot be opened.
    pub fn open(&self, port: u16) -> std::io::Result<Box<dyn App>> {
        Ok(match self {
            Self::Stream(stream) => Box::new(Streams::new(*stream, port)),
            Self::Http(root) => Box::new(FileServer::new(root, port)?),
        })
    }
}
