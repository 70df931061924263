//! Giving slots out: the order of attempts.

use super::device::{Device, Pick};
use super::lists::Listed;
use super::spare::Memory;
use super::{Cluster, Entry, Owner, Slots, CLUSTER_ORDER, CLUSTER_SLOTS, MAX_DEVICES};
use crate::flaw::{makes, Flaw};
use crate::sync::atomic::Ordering::{Acquire, Relaxed};
use crate::sync::Guard;

/// How far a rotational device looks ahead of its base for the next cluster.
const ASCEND_CLUSTERS: usize = 256;

/// An allocation under way.
struct Request<'a, F> {
    cpu: usize,
    order: u8,
    owner: F,
    out: &'a mut [Entry],
    done: usize,
    memory: Memory,
    lacks_memory: bool,
    /// A bit for each device that gives none.
    not: u64,
}

/// Why there is no run of an order.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Lack {
    /// No device has one free.
    Slots,
    /// There may be one, but there is no memory for its tables.
    Memory,
}

impl<F: Fn(usize) -> Owner> Request<'_, F> {
    fn is_done(&self) -> bool {
        self.done == self.out.len()
    }
}

/// What came of trying a list or a device.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Tried {
    /// The request got runs; maybe not all that it wants.
    Got,
    /// Nothing there.
    Nothing,
    /// Nothing, for want of memory.
    NoMemory,
}

impl Slots {
    /// A free run of `1 << order` slots, naturally aligned, within one cluster; each count is one and the
    /// owners are `owner` and the pages that follow it. `None`: there is no such run, try a smaller order;
    /// for order 0: no device has a slot left.
    ///
    /// `cpu` is where the caller runs, more or less. `order` is at most [`CLUSTER_ORDER`].
    pub fn alloc(&self, cpu: usize, order: u8, owner: Owner) -> Option<Entry> {
        self.alloc_by(cpu, order, owner, Memory::Asked, 0).ok()
    }

    /// The same, with memory from where the caller says, and not from the devices whose bits are set in `not`.
    ///
    /// # Errors
    /// What there is none of.
    pub fn alloc_by(
        &self,
        cpu: usize,
        order: u8,
        owner: Owner,
        memory: Memory,
        not: u64,
    ) -> Result<Entry, Lack> {
        let (owner, mut out) = (|_| owner, [Entry::INVALID]);
        let out_of = &mut out;
        let mut request =
            Request { cpu, order, owner, out: out_of, done: 0, memory, lacks_memory: false, not };
        self.alloc_from(&mut request);
        match request {
            Request { done: 1, .. } => Ok(out[0]),
            Request { lacks_memory: true, .. } => Err(Lack::Memory),
            _ => Err(Lack::Slots),
        }
    }

    /// Fills `out` with runs as [`Slots::alloc`] gives, the `i`th for `owner(i)`; returns how many it
    /// could have, which are the first of `out`.
    pub fn alloc_batch(
        &self,
        cpu: usize,
        order: u8,
        owner: impl Fn(usize) -> Owner,
        out: &mut [Entry],
    ) -> usize {
        let memory = Memory::Asked;
        let mut request = Request { cpu, order, owner, out, done: 0, memory, lacks_memory: false, not: 0 };
        self.alloc_from(&mut request);
        request.done
    }

    fn alloc_from<F: Fn(usize) -> Owner>(&self, request: &mut Request<F>) {
        let order = request.order;
        assert!(order <= CLUSTER_ORDER, "a run of order {order} is larger than a cluster");
        request.cpu %= self.cpus.len();
        if !request.is_done() {
            self.try_hint(request);
        }
        while !request.is_done() && self.try_devices(request) {}
    }

    /// Where the CPU allocated last. If somebody else is in there, another cluster is as good.
    fn try_hint<F: Fn(usize) -> Owner>(&self, request: &mut Request<F>) {
        let hint = &self.cpus[request.cpu].hints[request.order as usize];
        let Some(entry) = Entry::from_raw(hint.load(Relaxed)) else { return };
        let Ok((device, index, cluster)) = self.locate(entry) else { return };
        let Some(state) = cluster.try_lock() else { return };
        let gives = device.is_on() && request.not & device.id.bit() == 0;
        let holds = cluster.listed() == Listed::nonfull(request.order) && gives;
        if holds || makes(Flaw::HintBelieved) {
            self.fill(device, index, cluster, state, request, entry.offset_in_cluster());
        }
    }

    /// Takes what it can from a locked cluster and leaves it on the right list and, if it goes on there,
    /// in the hint. Returns whether it got anything.
    fn fill<F: Fn(usize) -> Owner>(
        &self,
        device: &Device,
        index: u32,
        cluster: &Cluster,
        mut state: Guard<'_, super::cluster::State>,
        request: &mut Request<F>,
        from: usize,
    ) -> bool {
        let (base, order, done) = (device.base(index), request.order, request.done);
        let ascending = device.is_rotational();
        let got = state.fill(base, order, (from, !ascending), &request.owner, request.out, done);
        request.done += got;
        let now = cluster.listed();
        let to = if state.is_full() {
            Listed::FULL
        } else if !request.is_done() && now == Listed::nonfull(order) && !state.fits() {
            Listed::fragmented(order)
        } else {
            now
        };
        let next = match request.out[..request.done].last() {
            Some(last) if got > 0 => last.offset_in_cluster() + (1 << order),
            _ => CLUSTER_SLOTS,
        };
        if ascending && got > 0 {
            let next = if next < CLUSTER_SLOTS { base.at(next) } else { device.base_after(index) };
            device.bases[order as usize].store(next.raw(), Relaxed);
        } else if !ascending {
            let stays = got > 0 && to == Listed::nonfull(order);
            let hint = if stays { base.at(next % CLUSTER_SLOTS).raw() } else { 0 };
            self.cpus[request.cpu].hints[order as usize].store(hint, Relaxed);
        }
        if to != now {
            let leftover = device.move_to(index, cluster, &mut state, to, || self.mark_available(device));
            drop(state);
            drop(leftover);
        }
        got > 0
    }

    /// The devices that seem to have room: by priority, equal ones in turn. Returns whether the request
    /// got anything; if not, there is nothing to be had.
    fn try_devices<F: Fn(usize) -> Owner>(&self, request: &mut Request<F>) -> bool {
        let turn = self.cpus[request.cpu].turn.load(Relaxed) as usize;
        let mut left = self.available.load(Relaxed) & !request.not;
        let mut tried = request.not;
        while let Some(device) = self.choose(left, turn).or_else(|| self.overlooked(request.order, tried)) {
            tried |= device.id.bit();
            match self.try_device(device, request) {
                Tried::Got => {
                    // The turn passes on with each cluster taken.
                    self.cpus[request.cpu].turn.store(device.id.index() as u32 + 1, Relaxed);
                    return true;
                }
                Tried::Nothing if request.order == 0 && self.seems_full(device) => {}
                Tried::Nothing if request.order == 0 => {
                    left |= device.id.bit();
                    continue;
                }
                Tried::Nothing => {}
                Tried::NoMemory => request.lacks_memory = true,
            }
            left &= !device.id.bit();
        }
        false
    }

    /// Of the devices in `left` one of the highest priority: the first at or after `turn`, round about.
    fn choose(&self, left: u64, turn: usize) -> Option<&Device> {
        let before_turn = (1 << (turn % MAX_DEVICES)) - 1;
        let in_turn = [left & !before_turn, left & before_turn];
        let mut best: Option<&Device> = None;
        for device in in_turn.into_iter().flat_map(bits).filter_map(|i| self.devices[i].get()) {
            if best.is_none_or(|best| device[0].priority() > best.priority()) {
                best = Some(&device[0]);
            }
        }
        best
    }

    /// A device with room for order 0 that none of the `tried` ones is: somebody was just about to find out
    /// whether it is full when the request looked.
    fn overlooked(&self, order: u8, tried: u64) -> Option<&Device> {
        if order != 0 {
            return None;
        }
        let devices = self.devices.iter().filter_map(|device| device.get()).map(|device| &device[0]);
        devices
            .filter(|device| tried & device.id.bit() == 0)
            .find(|device| device.is_on() && device.has_room())
    }

    /// Takes a device on which order 0 found nothing off the available ones, and makes sure. Room that
    /// appears after the look under the locks is announced by who makes it.
    fn seems_full(&self, device: &Device) -> bool {
        // Who said that it has room had switched it on before: that is seen below.
        let seen = if makes(Flaw::OnUnseen) { Relaxed } else { Acquire };
        self.available.fetch_and(!device.id.bit(), seen);
        if device.is_on() && device.has_room() && !makes(Flaw::FullUnsure) {
            self.available.fetch_or(device.id.bit(), Relaxed);
            return false;
        }
        true
    }

    fn try_device<F: Fn(usize) -> Owner>(&self, device: &Device, request: &mut Request<F>) -> Tried {
        loop {
            if !device.is_on() {
                return Tried::Nothing;
            }
            let mut search = Search { slots: self, device, request, busy: None, no_memory: false };
            if search.run() {
                return Tried::Got;
            }
            match search {
                Search { no_memory: true, .. } => return Tried::NoMemory,
                // All that there is was in use by others: wait for one of them, and look again.
                Search { busy: Some((index, cluster)), .. } => {
                    if self.wait_for(device, index, cluster, request) {
                        return Tried::Got;
                    }
                }
                _ => return Tried::Nothing,
            }
        }
    }

    /// Waits for a cluster and takes what it can there: who only waited, and let go, would turn away others that try,
    /// and they him, for as long as they like. Returns whether it got anything.
    fn wait_for<F: Fn(usize) -> Owner>(
        &self,
        device: &Device,
        index: u32,
        cluster: &Cluster,
        request: &mut Request<F>,
    ) -> bool {
        let mut state = cluster.lock();
        let (listed, order) = (cluster.listed(), request.order);
        let usable = device.is_on()
            && match listed.is_bare() {
                true => device.claim(index, cluster, &mut state, order),
                false => listed == Listed::nonfull(order) || order == 0 && listed.has_room(),
            };
        usable && self.fill(device, index, cluster, state, request, 0)
    }
}

/// The numbers of the bits that are set, ascending.
fn bits(mut mask: u64) -> impl Iterator<Item = usize> {
    core::iter::from_fn(move || {
        let lowest = (mask != 0).then_some(mask.trailing_zeros() as usize);
        mask &= mask.wrapping_sub(1);
        lowest
    })
}

/// One pass over a device for a request.
struct Search<'a, 'r, 'o, F> {
    slots: &'a Slots,
    device: &'a Device,
    request: &'r mut Request<'o, F>,
    busy: Option<(u32, &'a Cluster)>,
    no_memory: bool,
}

impl<F: Fn(usize) -> Owner> Search<'_, '_, '_, F> {
    /// The order of attempts. Returns whether the request got anything.
    fn run(&mut self) -> bool {
        let device = self.device;
        let order = self.request.order;
        let (nonfull, spread) = (Listed::nonfull(order), device.spread());
        let own = self.request.cpu % spread;
        if device.is_rotational() && self.ascend() {
            return true;
        }
        if self.list(own, nonfull) {
            return true;
        }
        // While there is plenty, CPUs keep apart; when there is not, clusters in use are filled first.
        // A cluster that serves whole clusters is free or full.
        let tight = order < CLUSTER_ORDER && !device.has_fresh() && device.shard(own).is_tight();
        if tight && self.others(own, nonfull) {
            return true;
        }
        if self.list(own, Listed::FREE)
            || self.adopt(own, None) && self.list(own, Listed::FREE)
            || self.others(own, nonfull)
            || self.others(own, Listed::FREE)
            || self.all(own, Listed::DISCARD)
        {
            return true;
        }
        // A fragmented cluster has no run of its order, and leaves that list when one appears.
        order == 0
            && ((1..=CLUSTER_ORDER).any(|larger| self.all(own, Listed::fragmented(larger)))
                || (1..=CLUSTER_ORDER).any(|larger| self.all(own, Listed::nonfull(larger))))
    }

    fn adopt(&mut self, own: usize, trunk: Option<u32>) -> bool {
        let Self { slots, device, .. } = *self;
        let memory = (&slots.spares, self.request.memory);
        let adopted = device.adopt(own, trunk, memory, || slots.mark_available(device));
        self.no_memory |= adopted.is_err();
        adopted.unwrap_or(false)
    }

    fn all(&mut self, own: usize, listed: Listed) -> bool {
        self.list(own, listed) || self.others(own, listed)
    }

    fn others(&mut self, own: usize, listed: Listed) -> bool {
        let spread = self.device.spread();
        (1..spread).any(|i| self.list((own + i) % spread, listed))
    }

    /// A cluster of one list. Those that turn out to have no run of the order leave it.
    fn list(&mut self, shard: usize, listed: Listed) -> bool {
        loop {
            match self.device.pick(shard, listed, self.request.order) {
                Pick::Got(index, cluster, state) => {
                    if !self.device.is_on() {
                        self.give_back(index, cluster, state);
                        return false;
                    }
                    if self.slots.fill(self.device, index, cluster, state, self.request, 0) {
                        return true;
                    }
                }
                Pick::NeedTable if self.device.add_spare(shard, &self.slots.spares, self.request.memory) => {}
                Pick::NeedTable => {
                    self.no_memory = true;
                    return false;
                }
                Pick::Busy(index, cluster) => {
                    self.busy = Some((index, cluster));
                    return false;
                }
                Pick::Empty => return false,
            }
        }
    }

    /// Puts a cluster back that was picked from a device which is off by now.
    fn give_back(&self, index: u32, cluster: &Cluster, mut state: Guard<'_, super::cluster::State>) {
        let to = state.home(cluster.listed(), false);
        let leftover = self.device.move_to(index, cluster, &mut state, to, || ());
        drop(state);
        self.slots.spares.give(leftover.table);
    }

    /// A rotational device: on from the shared base, in the next cluster up that has room.
    fn ascend(&mut self) -> bool {
        let Self { slots, device, .. } = *self;
        let order = self.request.order;
        let base = Entry::from_raw(device.bases[order as usize].load(Relaxed)).unwrap_or(device.base(0));
        let (first, from) = (base.cluster(), base.offset_in_cluster());
        if device.get(first).is_none_or(|cluster| cluster.listed() == Listed::ABSENT) {
            self.adopt(0, Some(device.trunk_of(first)));
        }
        for (index, cluster) in device.clusters(first).take(ASCEND_CLUSTERS) {
            let from = if index == first { from } else { 0 };
            while cluster.listed() == Listed::nonfull(order) || cluster.listed() == Listed::FREE {
                let mut state = cluster.lock();
                let usable = match cluster.listed() {
                    Listed::FREE if device.is_on() => device.claim(index, cluster, &mut state, order),
                    listed => listed == Listed::nonfull(order) && device.is_on(),
                };
                if usable {
                    if slots.fill(device, index, cluster, state, self.request, from) {
                        return true;
                    }
                    break;
                }
                drop(state);
                if !device.is_on() || !device.add_spare(0, &slots.spares, self.request.memory) {
                    break;
                }
            }
        }
        // The end: start over from below.
        device.bases[order as usize].store(0, Relaxed);
        false
    }
}
