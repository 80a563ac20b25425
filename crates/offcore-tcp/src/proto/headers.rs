//! The constant parts of the headers of a connection's packets.

use offcore_wire::{IpProtocol, MacAddr, TcpFlags, TcpOptions, TcpTemplate, Timestamps};

use super::addr::FlowKey;
use super::ip::Envelope;
use super::options::ConnOptions;
use super::output::{self, Fields, TxChecksum};
use super::packet::HEAD;

/// The parameters of the headers, and the template made from them.
#[derive(Debug, Default)]
pub(crate) struct Headers {
    options: ConnOptions,
    /// The IPv6 flow label.
    flow_label: u32,
    template: Option<TcpTemplate>,
}

impl Headers {
    pub(crate) fn new(options: ConnOptions, flow_label: u32) -> Self {
        Self { options, flow_label, template: None }
    }

    pub(crate) fn options(&self) -> &ConnOptions {
        &self.options
    }

    pub(crate) fn set_options(&mut self, options: ConnOptions) {
        (self.options, self.template) = (options, None);
    }

    /// Returns the addresses of a packet of flow `key`.
    #[inline]
    pub(crate) fn envelope(&self, key: &FlowKey, src_mac: MacAddr, dst_mac: MacAddr) -> Envelope {
        let envelope = Envelope::new(key.local().ip(), key.remote().ip(), IpProtocol::TCP);
        let (services, hops) = (self.options.services(), self.options.hops.unwrap_or(envelope.hops));
        Envelope { src_mac, dst_mac, ecn: services, hops, flow_label: self.flow_label, ..envelope }
    }

    /// Returns the template for segments with data of flow `key`.
    #[inline]
    pub(crate) fn template(&mut self, key: &FlowKey, timestamps: bool) -> &TcpTemplate {
        if self.template.is_none() {
            self.template = Some(self.make_template(key, timestamps));
        }
        self.template.as_ref().expect("it has just been made")
    }

    #[cold]
    fn make_template(&self, key: &FlowKey, timestamps: bool) -> TcpTemplate {
        let none = MacAddr([0; 6]);
        let mut headers = [0; HEAD];
        let timestamps = timestamps.then_some(Timestamps { value: 0, echo: 0 });
        let fields = Fields {
            src_port: key.local_port(),
            dst_port: key.remote_port(),
            seq: 0,
            ack: 0,
            flags: TcpFlags::ACK,
            window: 0,
            options: TcpOptions { timestamps, ..TcpOptions::default() },
        };
        let envelope = self.envelope(key, none, none);
        let (len, _) = output::write(&mut headers, &envelope, &fields, 0, TxChecksum::Port);
        TcpTemplate::new(&headers[..len]).expect("headers as they are written have a template")
    }
}
