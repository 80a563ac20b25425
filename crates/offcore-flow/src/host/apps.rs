//! Small applications: byte streams, an HTTP file server, and epping.

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

/// The application that runs on a host.
#[derive(Clone, Debug)]
pub enum Hosted {
    /// A service on this port of all addresses.
    Service(Service, u16),
    /// A sender.
    Epping(EppingConfig),
    /// Applications in other processes.
    Others(ServeConfig),
}

/// A service that listens on a host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Service {
    /// Bytes that are echoed, discarded, or generated.
    Stream(Stream),
    /// The files of a directory.
    Http(PathBuf),
}

impl Service {
    /// Creates the application, which will listen on `port` of all addresses.
    ///
    /// # Errors
    /// Fails if the directory cannot be opened.
    pub fn open(&self, port: u16) -> std::io::Result<Box<dyn App>> {
        Ok(match self {
            Self::Stream(stream) => Box::new(Streams::new(*stream, port)),
            Self::Http(root) => Box::new(FileServer::new(root, port)?),
        })
    }
}
