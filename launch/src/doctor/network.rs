//! Would other hosts reach this one by its name? Where the name leads to the loopback address, a job over several hosts waits for
//! ranks that talk to themselves.

use super::finding::{Finding, Group, Level};
use super::tree::Tree;
use std::net::IpAddr;

/// What `/etc/hosts` says about `name`.
pub fn findings(tree: &Tree, name: &str) -> Vec<Finding> {
    const WHAT: &str = "own host name";
    const FILE: &str = "/etc/hosts";
    let text = match tree.read(FILE) {
        Ok(text) => text,
        Err(why) => return vec![Finding::unread(Group::Network, WHAT, &why)],
    };
    let addresses: Vec<IpAddr> = text
        .lines()
        .map(|l| l.split('#').next().unwrap_or_default().split_whitespace().collect::<Vec<_>>())
        .filter(|words| words.iter().skip(1).any(|w| w.eq_ignore_ascii_case(name)))
        .filter_map(|words| words[0].parse().ok())
        .collect();
    let list = || addresses.iter().map(IpAddr::to_string).collect::<Vec<_>>().join(", ");
    vec![match addresses.as_slice() {
        [] => Finding::ok(Group::Network, WHAT, format!("{name}, not in {FILE}: the name service answers for it")),
        some if some.iter().any(IpAddr::is_loopback) => {
            Finding::new(Level::Note, Group::Network, WHAT, format!("{name} is {} here, which other hosts cannot reach", list()))
                .expected("an address of the network, for jobs over several hosts")
                .fix(format!(
                    "give MASTER_ADDR as an address (ip -br address) instead of {name}, or put that address before {name} in {FILE}"
                ))
        }
        _ => Finding::ok(Group::Network, WHAT, format!("{name} is {}", list())),
    }]
}
