//! The cache of fast open cookies (RFC 7413 §4.1.3), as `tcp_metrics` keeps them.

use crate::wire::tcp::FastOpenCookie;
use core::net::IpAddr;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// Local and remote address, between which a cookie is valid.
pub(super) type AddressPair = (IpAddr, IpAddr);

/// Which form of the option requests a cookie from a peer (`try_exp`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) enum RequestForm {
    /// The form of RFC 7413.
    #[default]
    Standard,
    /// The experimental form: the peer did not answer the other one.
    Experimental,
    /// The form of RFC 7413 again: the peer answers neither.
    Exhausted,
}

impl RequestForm {
    /// Returns the form after this number of requests that were not answered.
    pub fn after(unanswered: u8) -> Self {
        match unanswered {
            0 => Self::Standard,
            1 => Self::Experimental,
            _ => Self::Exhausted,
        }
    }
}

/// Knowledge about a peer.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct PeerEntry {
    /// The MSS that the peer has announced; 0 if it is not known.
    pub mss: u16,
    pub cookie: Option<FastOpenCookie>,
    pub request_form: RequestForm,
    /// Number of the store that changed the entry last.
    stored: u64,
}

/// Effect of a store on the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StoreResult {
    /// Everything was known.
    Unchanged,
    Changed,
    /// The entry is new, and another one was evicted.
    Evicted,
}

/// A bounded map. At the limit the entry that was changed least recently is evicted.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct CookieCache {
    entries: BTreeMap<AddressPair, PeerEntry>,
    by_age: BTreeSet<(u64, AddressPair)>,
    #[serde(skip)]
    entries_max: usize,
    stores: u64,
}

impl CookieCache {
    /// Takes over what another process knew, as far as it fits: the entries that were changed last.
    pub fn restore(&mut self, image: Self) {
        let Self { entries, by_age, stores, .. } = image;
        self.stores = stores;
        for (age, addresses) in by_age.into_iter().rev().take(self.entries_max) {
            if let Some(entry) = entries.get(&addresses).filter(|entry| entry.stored == age) {
                self.by_age.insert((age, addresses));
                self.entries.insert(addresses, entry.clone());
            }
        }
    }

    pub fn new(entries_max: u32) -> Self {
        Self {
            entries: BTreeMap::new(),
            by_age: BTreeSet::new(),
            entries_max: entries_max as usize,
            stores: 0,
        }
    }

    /// Returns what is known of a peer (`tcp_fastopen_cache_get`).
    pub fn get(&self, addresses: &AddressPair) -> Option<&PeerEntry> {
        self.entries.get(addresses)
    }

    /// Stores what a SYN+ACK has told (`tcp_fastopen_cache_set`): the MSS unless it is 0, the cookie if there
    /// is one, and otherwise the form in which to request one. An entry that does not change keeps its age.
    pub fn store(
        &mut self,
        addresses: AddressPair,
        mss: u16,
        cookie: Option<FastOpenCookie>,
        request_form: RequestForm,
    ) -> StoreResult {
        let known = self.entries.get(&addresses);
        let mut entry = known.cloned().unwrap_or_default();
        if mss != 0 {
            entry.mss = mss;
        }
        if cookie.is_some() {
            entry.cookie = cookie;
        } else if entry.cookie.is_none() {
            entry.request_form = entry.request_form.max(request_form);
        }
        if known == Some(&entry) {
            return StoreResult::Unchanged;
        }
        self.by_age.remove(&(entry.stored, addresses));
        self.stores += 1;
        entry.stored = self.stores;
        self.by_age.insert((self.stores, addresses));
        self.entries.insert(addresses, entry);
        if self.entries.len() <= self.entries_max {
            return StoreResult::Changed;
        }
        if let Some((_, oldest)) = self.by_age.pop_first() {
            self.entries.remove(&oldest);
        }
        StoreResult::Evicted
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::net::Ipv4Addr;

    fn pair(last: u8) -> AddressPair {
        (Ipv4Addr::new(10, 0, 0, 1).into(), Ipv4Addr::new(10, 0, 1, last).into())
    }

    fn cookie(byte: u8) -> Option<FastOpenCookie> {
        Some(FastOpenCookie::new(&[byte; 8], false))
    }

    // limit: tcp.fastopen_cookies_max
    #[test]
    fn least_recently_changed_cookie_is_evicted() {
        let mut cache = CookieCache::new(2);
        assert_eq!(cache.store(pair(1), 1000, cookie(1), RequestForm::Standard), StoreResult::Changed);
        assert_eq!(cache.store(pair(2), 1000, cookie(2), RequestForm::Standard), StoreResult::Changed);
        assert_eq!(cache.store(pair(1), 1200, None, RequestForm::Standard), StoreResult::Changed);
        assert_eq!(cache.store(pair(3), 1000, cookie(3), RequestForm::Standard), StoreResult::Evicted);
        assert_eq!(cache.get(&pair(2)), None);
        assert_eq!(cache.get(&pair(1)).map(|e| (e.mss, e.cookie.clone())), Some((1200, cookie(1))));
        assert_eq!((cache.entries.len(), cache.by_age.len()), (2, 2));
    }

    #[test]
    fn known_facts_change_nothing() {
        let mut cache = CookieCache::new(2);
        cache.store(pair(1), 1000, cookie(1), RequestForm::Standard);
        cache.store(pair(2), 0, None, RequestForm::Experimental);
        let before = (cache.entries.clone(), cache.by_age.clone());
        for (last, mss, cookie, form) in [
            (1, 1000, cookie(1), RequestForm::Standard),
            (1, 1000, None, RequestForm::Standard),
            (1, 0, None, RequestForm::Experimental),
            (2, 0, None, RequestForm::Experimental),
            (2, 0, None, RequestForm::Standard),
        ] {
            assert_eq!(cache.store(pair(last), mss, cookie, form), StoreResult::Unchanged);
        }
        assert_eq!((cache.entries, cache.by_age), before);
    }

    #[test]
    fn request_form_advances_only_without_cookie() {
        let mut cache = CookieCache::new(2);
        let form = |cache: &CookieCache, last| cache.get(&pair(last)).map(|e| e.request_form);
        cache.store(pair(1), 0, None, RequestForm::Experimental);
        cache.store(pair(1), 0, None, RequestForm::Standard);
        assert_eq!(form(&cache, 1), Some(RequestForm::Experimental));
        cache.store(pair(1), 0, None, RequestForm::Exhausted);
        assert_eq!(form(&cache, 1), Some(RequestForm::Exhausted));
        cache.store(pair(1), 0, cookie(7), RequestForm::Standard);
        assert_eq!(cache.get(&pair(1)).and_then(|e| e.cookie.clone()), cookie(7));
        cache.store(pair(2), 0, cookie(7), RequestForm::Standard);
        cache.store(pair(2), 0, None, RequestForm::Experimental);
        assert_eq!(form(&cache, 2), Some(RequestForm::Standard), "a peer with a cookie answers the form");
    }
}
