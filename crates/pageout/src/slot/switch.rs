//! Devices that come and go: swapon, swapoff, trunks.

use core::fmt;

use super::device::{Device, DeviceConfig, NoMemory};
use super::lists::Listed;
use super::spare::Memory;
use super::table::one;
use super::{DeviceId, Slots, CLUSTER_SLOTS, MAX_DEVICES, MAX_SLOTS, TRUNK_CLUSTERS};
use crate::flaw::{makes, Flaw};
use crate::sync::atomic::Ordering::{Relaxed, Release};

/// Why a device was not taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SwaponError {
    /// As many devices are on as there can be.
    TooManyDevices,
    /// More slots than a device can have, a header larger than a cluster, or trunks of a size that there is not.
    BadSize,
    /// Memory is short.
    NoMemory,
}

impl fmt::Display for SwaponError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooManyDevices => {
                write!(f, "{MAX_DEVICES} devices are on, as many as can be; give fewer")
            }
            Self::BadSize => write!(f, "a device has at most 64T, and less than 2M of it may be a header"),
            Self::NoMemory => f.write_str("no memory for the tables of another device"),
        }
    }
}

impl core::error::Error for SwaponError {}

/// Why a device cannot leave yet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SwapoffError {
    /// No such device is on.
    NoDevice,
    /// So many slots are in use: what is there is to leave first.
    InUse(u64),
    /// A cluster is being discarded: wait for [`Slots::discarded`].
    Discarding,
}

impl fmt::Display for SwapoffError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoDevice => f.write_str("no such device is on"),
            Self::InUse(slots) => write!(f, "{slots} pages are still on the device"),
            Self::Discarding => f.write_str("a part of the device is being discarded"),
        }
    }
}

impl core::error::Error for SwapoffError {}

impl Slots {
    /// Takes a device on. Its slots can be given from now on.
    pub fn swapon(&self, config: DeviceConfig) -> Result<DeviceId, SwaponError> {
        self.swapon_under(None, config)
    }

    /// The same under a number of the caller's choice; `TooManyDevices` while another device has it.
    pub fn swapon_as(&self, id: DeviceId, config: DeviceConfig) -> Result<(), SwaponError> {
        self.swapon_under(Some(id), config).map(drop)
    }

    fn swapon_under(&self, wanted: Option<DeviceId>, config: DeviceConfig) -> Result<DeviceId, SwaponError> {
        let trunk = config.trunk_clusters;
        let odd = !trunk.is_power_of_two() || trunk > TRUNK_CLUSTERS;
        if odd || config.slots > MAX_SLOTS || config.first >= CLUSTER_SLOTS as u64 {
            return Err(SwaponError::BadSize);
        }
        let mut numbers = self.numbers.lock();
        let id = wanted.or_else(|| DeviceId::new(numbers.trailing_ones() as usize));
        let id = id.filter(|id| *numbers & id.bit() == 0).ok_or(SwaponError::TooManyDevices)?;
        let number = id.index();
        let device = self.devices[number].get_or_try_init(|| {
            Device::new(id, self.cpus.len()).and_then(one).ok_or(SwaponError::NoMemory)
        })?;
        if !device[0].configure(&config) {
            return Err(SwaponError::NoMemory);
        }
        *numbers |= id.bit();
        device[0].set_on(true);
        self.available.fetch_or(id.bit(), Release);
        Ok(id)
    }

    pub(super) fn device_on(&self, id: DeviceId) -> Option<&Device> {
        self.device(id).filter(|_| *self.numbers.lock() & id.bit() != 0)
    }

    /// A trunk comes, of the size that the device's have: its first slot is `trunk` times that. `false` if it is
    /// there already, the device is not, or memory is short.
    pub fn add_trunk(&self, id: DeviceId, trunk: u32) -> bool {
        self.add_trunk_by(id, trunk, Memory::Asked) == Ok(true)
    }

    /// The same, with memory from where the caller says.
    ///
    /// # Errors
    /// There is none. The trunk is still nobody's.
    pub fn add_trunk_by(&self, id: DeviceId, trunk: u32, memory: Memory) -> Result<bool, NoMemory> {
        let Some(device) = self.device_on(id) else { return Ok(false) };
        let added = device.add_trunk(trunk, memory)?;
        if added {
            self.mark_available(device);
        }
        Ok(added)
    }

    /// A trunk of which no slot is used goes, if there are more than `kept`; its number, for who leased it. What of it
    /// waited for [`Slots::take_discard`] does so no more.
    pub fn take_empty_trunk(&self, id: DeviceId, kept: usize) -> Option<u32> {
        self.device_on(id)?.take_empty_trunk(kept)
    }

    /// From when this returns no slot of the device is given any more; its use only falls. `false` if no
    /// such device is on.
    pub fn swapoff_begin(&self, id: DeviceId) -> bool {
        let Some(device) = self.device_on(id) else { return false };
        device.set_on(false);
        self.available.fetch_and(!id.bit(), Relaxed);
        if !makes(Flaw::OffAtOnce) {
            device.settle();
        }
        true
    }

    /// The device goes on as if swapoff had never begun.
    pub fn swapoff_cancel(&self, id: DeviceId) {
        if let Some(device) = self.device_on(id) {
            device.set_on(true);
            self.available.fetch_or(id.bit(), Release);
        }
    }

    /// The device leaves, if swapoff has begun and no slot is in use any more. Its number is free.
    pub fn swapoff_end(&self, id: DeviceId) -> Result<(), SwapoffError> {
        let mut numbers = self.numbers.lock();
        let device = self.device(id).filter(|_| *numbers & id.bit() != 0).ok_or(SwapoffError::NoDevice)?;
        match self.count_used(device) {
            0 => {}
            _ if makes(Flaw::EndUnsure) => {}
            used => return Err(SwapoffError::InUse(used)),
        }
        if device.clusters(0).any(|(_, cluster)| cluster.listed() == Listed::DISCARDING) {
            return Err(SwapoffError::Discarding);
        }
        device.renew();
        *numbers &= !id.bit();
        Ok(())
    }

    pub(super) fn count_used(&self, device: &Device) -> u64 {
        device.clusters(0).map(|(_, cluster)| cluster.lock().used() as u64).sum()
    }
}
