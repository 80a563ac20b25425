//! Negotiation between a front end and its back end before virtqueues are set up.

use super::{FrontEnd, FrontEndConfig, FrontEndError};
use crate::features::{
    STATUS_ACKNOWLEDGE, STATUS_DRIVER, STATUS_FEATURES_OK, VHOST_USER_F_PROTOCOL_FEATURES,
    VHOST_USER_PROTOCOL_F_CONFIGURE_MEM_SLOTS, VHOST_USER_PROTOCOL_F_INFLIGHT_SHMFD,
    VHOST_USER_PROTOCOL_F_MQ, VHOST_USER_PROTOCOL_F_NET_MTU, VHOST_USER_PROTOCOL_F_REPLY_ACK,
    VHOST_USER_PROTOCOL_F_RESET_DEVICE, VHOST_USER_PROTOCOL_F_STATUS, VIRTIO_F_VERSION_1,
    VIRTIO_NET_F_CTRL_VQ, VIRTIO_NET_F_GUEST_ECN, VIRTIO_NET_F_GUEST_TSO4, VIRTIO_NET_F_GUEST_TSO6,
    VIRTIO_NET_F_GUEST_USO4, VIRTIO_NET_F_GUEST_USO6, VIRTIO_NET_F_MQ, VIRTIO_NET_F_MRG_RXBUF,
    VIRTIO_NET_F_MTU, effective,
};
use crate::message::Request;

/// The protocol features to use if they are offered.
const PROTOCOL_WANTED: u64 = VHOST_USER_PROTOCOL_F_MQ
    | VHOST_USER_PROTOCOL_F_REPLY_ACK
    | VHOST_USER_PROTOCOL_F_NET_MTU
    | VHOST_USER_PROTOCOL_F_RESET_DEVICE
    | VHOST_USER_PROTOCOL_F_INFLIGHT_SHMFD
    | VHOST_USER_PROTOCOL_F_CONFIGURE_MEM_SLOTS
    | VHOST_USER_PROTOCOL_F_STATUS;

/// Features for receiving large packets, which do not fit into a single buffer.
const LARGE: u64 = VIRTIO_NET_F_GUEST_TSO4
    | VIRTIO_NET_F_GUEST_TSO6
    | VIRTIO_NET_F_GUEST_ECN
    | VIRTIO_NET_F_GUEST_USO4
    | VIRTIO_NET_F_GUEST_USO6;

/// Reduces the common features of both sides to a valid set. A driver must not choose a feature without its
/// dependencies (virtio 1.2, section 5.1.3.1). Large packets are accepted only with mergeable buffers.
fn usable(features: u64) -> u64 {
    effective(if features & VIRTIO_NET_F_MRG_RXBUF == 0 { features & !LARGE } else { features })
}

impl FrontEnd {
    /// Negotiates virtio features, protocol features and the number of queues.
    pub(super) fn negotiate(&mut self, config: &FrontEndConfig) -> Result<(), FrontEndError> {
        let several = config.queue_pairs > 1;
        let offered = self.value(Request::GetFeatures)?;
        if offered & VIRTIO_F_VERSION_1 == 0 {
            return Err(FrontEndError::Legacy { offered });
        }
        if offered & VHOST_USER_F_PROTOCOL_FEATURES != 0 {
            let chosen = self.value(Request::GetProtocolFeatures)? & PROTOCOL_WANTED;
            self.command(Request::SetProtocolFeatures(chosen))?;
            self.protocol = chosen;
        }
        let has_mq = self.protocol & VHOST_USER_PROTOCOL_F_MQ != 0;
        let lacking = match offered & VIRTIO_NET_F_MQ {
            0 => Some("NET_MQ (feature 22)"),
            _ if !has_mq => Some("MQ (protocol feature 0)"),
            _ => None,
        };
        if let Some(lacking) = lacking.filter(|_| several) {
            return Err(FrontEndError::NoMultiqueue { lacking, expected: config.queue_pairs });
        }
        let found = if has_mq { self.value(Request::GetQueueNum)? } else { 1 };
        if found < config.queue_pairs.into() {
            return Err(FrontEndError::QueuePairs { found, expected: config.queue_pairs });
        }
        if self.protocol & VHOST_USER_PROTOCOL_F_CONFIGURE_MEM_SLOTS != 0 {
            let slots = self.value(Request::GetMaxMemSlots)?;
            self.slots = usize::try_from(slots).unwrap_or(usize::MAX);
        }
        self.command(Request::SetOwner)?;
        let pairs = if several { VIRTIO_NET_F_MQ | VIRTIO_NET_F_CTRL_VQ } else { 0 };
        let mtu = if config.mtu.is_some() { VIRTIO_NET_F_MTU } else { 0 };
        let wanted = config.features | pairs | mtu | VHOST_USER_F_PROTOCOL_FEATURES | VIRTIO_F_VERSION_1;
        self.features = usable(offered & wanted);
        self.choose_features()
    }

    /// Sends the chosen features, in the same order as a driver that initializes the device, and then the MTU.
    pub(super) fn choose_features(&mut self) -> Result<(), FrontEndError> {
        self.add_status(STATUS_ACKNOWLEDGE)?;
        self.add_status(STATUS_DRIVER)?;
        self.command(Request::SetFeatures(self.features))?;
        self.add_status(STATUS_FEATURES_OK)?;
        if self.protocol & VHOST_USER_PROTOCOL_F_STATUS != 0 {
            let found = self.value(Request::GetStatus)?;
            if found & u64::from(STATUS_FEATURES_OK) == 0 {
                return Err(FrontEndError::FeaturesRefused { features: self.features, found });
            }
        }
        match self.mtu {
            Some(mtu)
                if self.features & VIRTIO_NET_F_MTU != 0
                    && self.protocol & VHOST_USER_PROTOCOL_F_NET_MTU != 0 =>
            {
                self.command(Request::NetSetMtu(mtu.into()))
            }
            _ => Ok(()),
        }
    }

    /// Sets another bit of the device status, if the back end supports this.
    pub(super) fn add_status(&mut self, bit: u8) -> Result<(), FrontEndError> {
        if self.protocol & VHOST_USER_PROTOCOL_F_STATUS != 0 && self.status & bit == 0 {
            self.command(Request::SetStatus((self.status | bit).into()))?;
            self.status |= bit;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::features::{
        VIRTIO_NET_F_CSUM, VIRTIO_NET_F_GUEST_CSUM, VIRTIO_NET_F_HOST_ECN, VIRTIO_NET_F_HOST_TSO4,
    };

    #[test]
    fn features_without_dependencies_are_not_chosen() {
        let both = VIRTIO_NET_F_CSUM | VIRTIO_NET_F_HOST_TSO4 | VIRTIO_NET_F_GUEST_CSUM | LARGE;
        assert_eq!(usable(both | VIRTIO_NET_F_MRG_RXBUF), both | VIRTIO_NET_F_MRG_RXBUF);
        assert_eq!(usable(both), VIRTIO_NET_F_CSUM | VIRTIO_NET_F_HOST_TSO4 | VIRTIO_NET_F_GUEST_CSUM);
        assert_eq!(
            usable(VIRTIO_NET_F_HOST_TSO4 | VIRTIO_NET_F_HOST_ECN | LARGE | VIRTIO_NET_F_MRG_RXBUF),
            VIRTIO_NET_F_MRG_RXBUF
        );
    }
}
