//! Small applications: streams of bytes, and files by HTTP.

pub mod http;
pub mod streams;

use std::path::PathBuf;

use super::App;
use http::FileServer;
use streams::{Stream, Streams};

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
