//! A host's service as text: `echo`, `sink:5001`, `http:DIR:8080`.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use offcore_flow::host::apps::Service;
use offcore_flow::host::apps::streams::Stream;
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A service and its listening port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServiceSpec {
    pub service: Service,
    pub port: u16,
}

impl Default for ServiceSpec {
    fn default() -> Self {
        Self { service: Service::Stream(Stream::Echo), port: 7 }
    }
}

impl FromStr for ServiceSpec {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, rest) = text.split_once(':').map_or((text, None), |(name, rest)| (name, Some(rest)));
        let (stream, usual) = match name {
            "echo" => (Stream::Echo, 7),
            "sink" => (Stream::Sink, 9),
            "source" => (Stream::Source, 19),
            "http" => return http(rest.unwrap_or_default()),
            _ => return Err("expected echo, sink, source or http:DIR, such as echo:7000".into()),
        };
        let port = rest.map_or(Ok(usual), tcp_port)?;
        Ok(Self { service: Service::Stream(stream), port })
    }
}

/// Parses the part behind `http:`: a directory, and optionally a port behind the last colon if a number follows it.
fn http(rest: &str) -> Result<ServiceSpec, String> {
    let is_number = |port: &str| !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit());
    let (directory, port) = match rest.rsplit_once(':').filter(|(_, port)| is_number(port)) {
        Some((directory, port)) => (directory, tcp_port(port)?),
        None => (rest, 80),
    };
    if directory.is_empty() {
        return Err("expected http:DIR, such as http:/srv/www or http:/srv/www:8080".into());
    }
    Ok(ServiceSpec { service: Service::Http(PathBuf::from(directory)), port })
}

fn tcp_port(port: &str) -> Result<u16, String> {
    let number = port.parse().ok().filter(|port| *port > 0);
    number.ok_or_else(|| format!("port '{port}': expected 1 to 65535"))
}

impl fmt::Display for ServiceSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.service {
            Service::Stream(Stream::Echo) => write!(f, "echo:{}", self.port),
            Service::Stream(Stream::Sink) => write!(f, "sink:{}", self.port),
            Service::Stream(Stream::Source) => write!(f, "source:{}", self.port),
            Service::Http(directory) => write!(f, "http:{}:{}", directory.display(), self.port),
        }
    }
}

impl<'de> Deserialize<'de> for ServiceSpec {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
    }
}

impl Serialize for ServiceSpec {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn services_have_ports() {
        let shown = |text: &str| text.parse::<ServiceSpec>().map(|service| service.to_string());
        for (text, full) in [
            ("sink", "sink:9"),
            ("echo:7000", "echo:7000"),
            ("http:/srv/www", "http:/srv/www:80"),
            ("http:a:b:8080", "http:a:b:8080"),
            ("http:a:b", "http:a:b:80"),
        ] {
            assert_eq!(shown(text).unwrap(), full);
        }
        for (text, expected) in [
            ("http", "expected http:DIR"),
            ("http:", "expected http:DIR"),
            ("http::80", "expected http:DIR"),
            ("http:/srv/www:0", "expected 1 to 65535"),
            ("http:/srv/www:70000", "expected 1 to 65535"),
            ("ftp", "expected echo, sink, source or http:DIR"),
            ("echo:0", "expected 1 to 65535"),
        ] {
            let error = shown(text).unwrap_err();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }
}
