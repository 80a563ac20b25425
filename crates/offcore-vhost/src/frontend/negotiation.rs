//! What a front end and its back end agree on before there are virtqueues.

use super::{FrontEnd, FrontEndConfig, FrontEndError};
use crate::features::{
    NET_CTRL_VQ, NET_GUEST_ECN, NET_GUEST_TSO4, NET_GUEST_TSO6, NET_MQ, NET_MRG_RXBUF, NET_MTU,
    PROTOCOL_CONFIGURE_MEM_SLOTS, PROTOCOL_MQ, PROTOCOL_NET_MTU, PROTOCOL_REPLY_ACK, PROTOCOL_RESET_DEVICE,
    PROTOCOL_STATUS, STATUS_ACKNOWLEDGE, STATUS_DRIVER, STATUS_FEATURES_OK, VERSION_1,
    VHOST_USER_PROTOCOL_FEATURES, effective,
};
use crate::message::Request;

/// The protocol features that are used where they are offered.
const PROTOCOL_WANTED: u64 = PROTOCOL_MQ
    | PROTOCOL_REPLY_ACK
    | PROTOCOL_NET_MTU
    | PROTOCOL_RESET_DEVICE
    | PROTOCOL_CONFIGURE_MEM_SLOTS
    | PROTOCOL_STATUS;

/// Large packets to this side, for which no single buffer has room.
const LARGE: u64 = NET_GUEST_TSO4 | NET_GUEST_TSO6 | NET_GUEST_ECN;

/// Of the features that both sides could use those that go together: a driver must not choose one without what it needs
/// (virtio 1.2, section 5.1.3.1), and takes no large packets unless they may come in several buffers.
fn usable(features: u64) -> u64 {
    effective(if features & NET_MRG_RXBUF == 0 { features & !LARGE } else { features })
}

impl FrontEnd {
    /// Negotiates everything.
    pub(super) fn negotiate(&mut self, config: &FrontEndConfig) -> Result<(), FrontEndError> {
        let several = config.queue_pairs > 1;
        let offered = self.value(Request::GetFeatures)?;
        if offered & VERSION_1 == 0 {
            return Err(FrontEndError::Legacy { offered });
        }
        if offered & VHOST_USER_PROTOCOL_FEATURES != 0 {
            let chosen = self.value(Request::GetProtocolFeatures)? & PROTOCOL_WANTED;
            self.command(Request::SetProtocolFeatures(chosen))?;
            self.protocol = chosen;
        }
        let found = match self.protocol & PROTOCOL_MQ {
            0 => 1,
            _ => self.value(Request::GetQueueNum)?,
        };
        if found < config.queue_pairs.into() || several && offered & NET_MQ == 0 {
            return Err(FrontEndError::QueuePairs { found, expected: config.queue_pairs });
        }
        if self.protocol & PROTOCOL_CONFIGURE_MEM_SLOTS != 0 {
            let slots = self.value(Request::GetMaxMemSlots)?;
            self.slots = usize::try_from(slots).unwrap_or(usize::MAX);
        }
        self.command(Request::SetOwner)?;
        let pairs = if several { NET_MQ | NET_CTRL_VQ } else { 0 };
        let mtu = if config.mtu.is_some() { NET_MTU } else { 0 };
        let wanted = config.features | pairs | mtu | VHOST_USER_PROTOCOL_FEATURES | VERSION_1;
        self.features = usable(offered & wanted);
        self.choose_features()
    }

    /// Tells the features chosen, as a driver does that has just found the device, and the MTU.
    pub(super) fn choose_features(&mut self) -> Result<(), FrontEndError> {
        self.add_status(STATUS_ACKNOWLEDGE)?;
        self.add_status(STATUS_DRIVER)?;
        self.command(Request::SetFeatures(self.features))?;
        self.add_status(STATUS_FEATURES_OK)?;
        if self.protocol & PROTOCOL_STATUS != 0 {
            let found = self.value(Request::GetStatus)?;
            if found & u64::from(STATUS_FEATURES_OK) == 0 {
                return Err(FrontEndError::FeaturesRefused { features: self.features, found });
            }
        }
        match self.mtu {
            Some(mtu) if self.features & NET_MTU != 0 && self.protocol & PROTOCOL_NET_MTU != 0 => {
                self.command(Request::NetSetMtu(mtu.into()))
            }
            _ => Ok(()),
        }
    }

    /// Sets one more bit of the device status, where the back end wants to know it.
    pub(super) fn add_status(&mut self, bit: u8) -> Result<(), FrontEndError> {
        if self.protocol & PROTOCOL_STATUS != 0 && self.status & bit == 0 {
            self.command(Request::SetStatus((self.status | bit).into()))?;
            self.status |= bit;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::features::{NET_CSUM, NET_GUEST_CSUM, NET_HOST_ECN, NET_HOST_TSO4};

    #[test]
    fn features_are_chosen_with_what_they_need() {
        let both = NET_CSUM | NET_HOST_TSO4 | NET_GUEST_CSUM | LARGE;
        assert_eq!(usable(both | NET_MRG_RXBUF), both | NET_MRG_RXBUF);
        assert_eq!(usable(both), NET_CSUM | NET_HOST_TSO4 | NET_GUEST_CSUM);
        assert_eq!(usable(NET_HOST_TSO4 | NET_HOST_ECN | LARGE | NET_MRG_RXBUF), NET_MRG_RXBUF);
    }
}
