//! The allocator and its counts against a plain map, by random steps: orders, batches, parts of runs,
//! several devices, trunks that come and go, swapoff in between. A million steps in a release build.
#![cfg(not(any(loom, shuttle)))]

use std::collections::{BTreeMap, BTreeSet};

use pageout::slot::*;
use proptest::prelude::*;

const STEPS: usize = 1000;
/// Of each of two tests.
const CASES: u32 = if cfg!(debug_assertions) { 6 } else { 500 };

#[derive(Clone, Debug)]
enum Step {
    Alloc { cpu: usize, order: u8 },
    Batch { cpu: usize, order: u8, n: usize },
    Dup { which: usize, n: usize, times: usize },
    Put { which: usize, n: usize },
    PutMany { from: usize, n: usize },
    Wrong { raw: u64 },
    Swapon { priority: i32, rotational: bool, discard: bool, slots: u64, first: u64, trunk_clusters: usize },
    Swapoff { which: usize, gives_up: bool },
    AddTrunk { which: usize, trunk: u32 },
    TakeTrunk { which: usize, kept: usize },
    Discard { which: usize },
}

fn step() -> impl Strategy<Value = Step> {
    use Step::*;
    let cpu = 0..3usize;
    let which = any::<usize>();
    prop_oneof![
        12 => (cpu.clone(), 0..=CLUSTER_ORDER).prop_map(|(cpu, order)| Alloc { cpu, order }),
        8 => (cpu.clone(), 0..5u8, 1..200usize).prop_map(|(cpu, order, n)| Batch { cpu, order, n }),
        4 => (which, 1..20usize, prop_oneof![9 => 1..3usize, 1 => 200..300usize])
            .prop_map(|(which, n, times)| Dup { which, n, times }),
        25 => (which, 1..64usize).prop_map(|(which, n)| Put { which, n }),
        8 => (which, 1..600usize).prop_map(|(from, n)| PutMany { from, n }),
        1 => (1u64..1 << 40).prop_map(|raw| Wrong { raw }),
        1 => (-2..3i32, any::<bool>(), any::<bool>(), 0..4u64, 1..2000u64, 0..3u64, 0..6u32).prop_map(
            |(priority, rotational, discard, whole, more, first, trunk)| Swapon {
                priority, rotational, discard, slots: whole * 512 + if whole % 2 == 0 { more } else { 0 }, first,
                trunk_clusters: 1 << trunk,
            }
        ),
        1 => (which, any::<bool>()).prop_map(|(which, gives_up)| Swapoff { which, gives_up }),
        1 => (which, 0..6u32).prop_map(|(which, trunk)| AddTrunk { which, trunk }),
        1 => (which, 0..2usize).prop_map(|(which, kept)| TakeTrunk { which, kept }),
        1 => which.prop_map(|which| Discard { which }),
    ]
}

/// What the allocator should know, said plainly.
struct Plain {
    slots: Slots,
    used: BTreeMap<Entry, (Owner, u32)>,
    bad: BTreeSet<Entry>,
    /// Devices with their trunks, their slots, and those of a trunk.
    devices: Vec<(DeviceId, BTreeSet<u64>, u64, u64)>,
    page: u64,
}

impl Plain {
    fn new() -> Self {
        Self {
            slots: Slots::new(3),
            used: BTreeMap::new(),
            bad: BTreeSet::new(),
            devices: Vec::new(),
            page: 0,
        }
    }

    fn owner(&mut self, slots: usize) -> Owner {
        self.page += slots as u64;
        Owner { space: self.page as u16 % 7, page: self.page - slots as u64 }
    }

    /// A used slot, chosen by a number.
    fn pick(&self, which: usize) -> Option<Entry> {
        let (first, last) = (*self.used.first_key_value()?.0, *self.used.last_key_value()?.0);
        let span = last.raw() - first.raw() + 1;
        let from = Entry::from_raw(first.raw() + (which as u64) % span)?;
        self.used.range(from..).next().map(|(&entry, _)| entry)
    }

    /// How many of up to `n` slots from `entry` are used and in its cluster.
    fn run(&self, entry: Entry, n: usize) -> usize {
        let room = CLUSTER_SLOTS - (entry.slot() % CLUSTER_SLOTS as u64) as usize;
        (0..n.min(room)).take_while(|&i| self.used.contains_key(&entry.at(i))).count()
    }

    fn took(&mut self, entry: Entry, order: u8, owner: Owner) {
        assert_eq!(entry.slot() % (1 << order), 0, "aligned");
        let id = entry.device().unwrap();
        let (_, trunks, end, trunk) =
            self.devices.iter().find(|device| device.0 == id).expect("a device that is on");
        assert!(trunks.contains(&(entry.slot() / trunk)) && entry.slot() + (1 << order) <= *end);
        for i in 0..1 << order {
            let named = Owner { page: owner.page + i as u64, ..owner };
            assert_eq!(self.used.insert(entry.at(i), (named, 1)), None, "given once");
            assert!(!self.bad.contains(&entry.at(i)));
        }
    }

    fn dropped(&mut self, entry: Entry) {
        let count = &mut self.used.get_mut(&entry).unwrap().1;
        *count -= 1;
        if *count == 0 {
            self.used.remove(&entry);
        }
    }

    /// Nothing is left for order 0.
    fn is_full(&self) -> bool {
        self.devices.iter().all(|(id, ..)| {
            let usage = self.slots.usage(*id).unwrap();
            let bad = self.bad.iter().filter(|entry| entry.device() == Some(*id)).count() as u64;
            usage.used + bad == usage.slots
        })
    }

    fn step(&mut self, step: &Step) {
        match *step {
            Step::Alloc { cpu, order } => {
                let owner = self.owner(1 << order);
                match self.slots.alloc(cpu, order, owner) {
                    Some(entry) => self.took(entry, order, owner),
                    None => assert!(order > 0 || self.is_full(), "a slot was there"),
                }
            }
            Step::Batch { cpu, order, n } => {
                let owner = self.owner(n << order);
                let each = |i: usize| Owner { page: owner.page + (i << order) as u64, ..owner };
                let mut out = vec![Entry::INVALID; n];
                let got = self.slots.alloc_batch(cpu, order, each, &mut out);
                assert!(out[got..].iter().all(|&entry| entry == Entry::INVALID));
                (0..got).for_each(|i| self.took(out[i], order, each(i)));
                assert!(got == n || order > 0 || self.is_full(), "a slot was there");
            }
            Step::Dup { which, n, times } => {
                let Some(entry) = self.pick(which) else { return };
                let n = self.run(entry, n);
                for _ in 0..times {
                    self.slots.dup(entry, n).unwrap();
                    (0..n).for_each(|i| self.used.get_mut(&entry.at(i)).unwrap().1 += 1);
                }
            }
            Step::Put { which, n } => {
                let Some(entry) = self.pick(which) else { return };
                let n = self.run(entry, n);
                self.slots.put(entry, n).unwrap();
                (0..n).for_each(|i| self.dropped(entry.at(i)));
            }
            Step::PutMany { from, n } => {
                let Some(entry) = self.pick(from) else { return };
                let mut entries: Vec<Entry> =
                    self.used.range(entry..).step_by(1 + from % 3).take(n).map(|(&entry, _)| entry).collect();
                entries.reverse();
                self.slots.put_batch(&mut entries).unwrap();
                entries.into_iter().for_each(|entry| self.dropped(entry));
            }
            Step::Wrong { raw } => {
                let Some(entry) = Entry::from_raw(raw) else { return };
                let right = self.used.get(&entry).copied();
                assert_eq!(self.slots.look(entry).ok(), right);
                if right.is_none() {
                    assert!(self.slots.put(entry, 1).is_err() && self.slots.dup(entry, 1).is_err());
                }
            }
            Step::Swapon { priority, rotational, discard, slots, first, trunk_clusters } => {
                if self.devices.len() < 4 {
                    let first = if slots == 0 { 0 } else { first.min(slots - 1) };
                    let config = DeviceConfig { priority, rotational, discard, slots, first, trunk_clusters };
                    let id = self.slots.swapon(config).unwrap();
                    let trunk_slots = (trunk_clusters * CLUSTER_SLOTS) as u64;
                    let trunks = (0..slots.div_ceil(trunk_slots)).collect();
                    self.devices.push((id, trunks, slots, trunk_slots));
                    self.bad.extend((0..first).map(|slot| Entry::new(id, slot)));
                }
            }
            Step::Swapoff { which, gives_up } => self.swapoff(which, gives_up),
            Step::AddTrunk { which, trunk } => {
                let n = self.devices.len();
                if n > 0 && self.used.len() < 20_000 {
                    let (id, trunks, end, trunk_slots) = &mut self.devices[which % n];
                    // A device that ends within a trunk does not grow.
                    if *end % *trunk_slots == 0 {
                        assert_eq!(self.slots.add_trunk(*id, trunk), trunks.insert(trunk as u64));
                        *end = (*end).max((trunk as u64 + 1) * *trunk_slots);
                    }
                }
            }
            Step::TakeTrunk { which, kept } => {
                let n = self.devices.len();
                if n > 0 {
                    let (id, trunks, end, trunk_slots) = &mut self.devices[which % n];
                    if let Some(trunk) = self.slots.take_empty_trunk(*id, kept) {
                        assert!(trunks.remove(&(trunk as u64)), "a trunk that it had");
                        let first = Entry::new(*id, trunk as u64 * *trunk_slots);
                        let last = first.raw() + *trunk_slots;
                        assert!(last <= Entry::new(*id, *end).raw(), "a whole one");
                        assert!(self.used.range(first..).next().is_none_or(|(next, _)| next.raw() >= last));
                        assert!(self.bad.range(first..).next().is_none_or(|next| next.raw() >= last));
                    }
                }
            }
            Step::Discard { which } => {
                let n = self.devices.len();
                if n > 0 {
                    let id = self.devices[which % n].0;
                    if let Some(entry) = self.slots.take_discard(id) {
                        assert!(self.used.range(entry..entry.at(CLUSTER_SLOTS - 1)).next().is_none());
                        self.slots.discarded(entry);
                    }
                }
            }
        }
    }

    /// Brings a device home by a walk over its used slots; some do it in two goes.
    fn swapoff(&mut self, which: usize, gives_up: bool) {
        if self.devices.is_empty() {
            return;
        }
        let at = which % self.devices.len();
        let id = self.devices[at].0;
        assert!(self.slots.swapoff_begin(id));
        let mut walk = self.slots.walk(id);
        let mut last = None;
        let mut left = if gives_up { 50 } else { usize::MAX };
        while let Some((entry, owner, count)) = self.slots.next_used(&mut walk) {
            assert!(entry.device() == Some(id) && last < Some(entry), "ascending");
            assert_eq!(self.used.remove(&entry), Some((owner, count)));
            (0..count).for_each(|_| _ = self.slots.put(entry, 1).unwrap());
            last = Some(entry);
            left -= 1;
            if left == 0 {
                self.slots.swapoff_cancel(id);
                return;
            }
        }
        assert!(!self.used.keys().any(|entry| entry.device() == Some(id)), "the walk met them all");
        assert_eq!(self.slots.swapoff_end(id), Ok(()));
        self.bad.retain(|entry| entry.device() != Some(id));
        self.devices.remove(at);
    }

    fn check(&self) {
        for (entry, &known) in &self.used {
            assert_eq!(self.slots.look(*entry), Ok(known));
        }
        for (id, ..) in &self.devices {
            let used = self.used.keys().filter(|entry| entry.device() == Some(*id)).count() as u64;
            assert_eq!(self.slots.usage(*id).unwrap().used, used);
        }
        self.slots.audit();
    }
}

fn is_a_plain_map(steps: &[Step]) {
    let mut plain = Plain::new();
    let first = Step::Swapon {
        priority: 0,
        rotational: false,
        discard: false,
        slots: 1536,
        first: 1,
        trunk_clusters: TRUNK_CLUSTERS,
    };
    plain.step(&first);
    for (i, step) in steps.iter().enumerate() {
        plain.step(step);
        if i % 250 == 249 {
            plain.check();
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: CASES, max_shrink_iters: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn allocator_and_counts_are_those_of_a_plain_map(steps in prop::collection::vec(step(), STEPS)) {
        is_a_plain_map(&steps);
    }

    /// The other half of the steps, on the other CPU.
    #[test]
    fn allocator_and_counts_are_those_of_a_plain_map_again(steps in prop::collection::vec(step(), STEPS)) {
        is_a_plain_map(&steps);
    }
}
