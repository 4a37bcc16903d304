//! What the screen shows, as data: messages and keys come in, nothing goes out but orders.

use super::wire::{Experts, Layer, Model, State, Tick, Totals};
use crate::governor::{Change, Entry};
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use std::collections::VecDeque;

/// Journal lines that are kept.
const MOST_LINES: usize = 200;
/// Points of the rates' history.
pub(super) const MOST_POINTS: usize = 240;
/// Seconds of running totals that a rate is taken over.
const RATE_S: f64 = 2.0;
/// Samples that are kept for rates: more than any tick rate needs.
const MOST_SAMPLES: usize = 512;

/// What is wrong with the connection, or nothing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Link {
    /// Messages come.
    Up,
    /// The server has gone; it is sought again.
    Lost(String),
}

/// What comes from the server's side.
#[derive(Debug, Clone)]
pub(super) enum Message {
    /// A connection was made.
    State(Box<State>),
    /// A tick.
    Tick(Box<Tick>),
    /// The connection has ended.
    Lost(String),
    /// An answer to an order or a question.
    Told(String),
}

/// What the user asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Order {
    /// End.
    Quit,
    /// Freeze the pinned set, or not.
    Pause(bool),
    /// Explain an expert.
    Explain(usize, usize),
}

/// Rates over the last seconds.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Rates {
    /// Generated tokens a second.
    pub tokens: f64,
    /// Routed experts that were resident; `None` where none was routed.
    pub hit_ratio: Option<f64>,
    /// Bytes read a second.
    pub read_bytes: f64,
    /// Part of the time that was waited for expert bytes, 0 to 1.
    pub stall: f64,
}

/// Everything that is shown.
#[derive(Debug)]
pub(super) struct View {
    pub url: String,
    /// Whether orders can be given.
    pub has_key: bool,
    pub link: Link,
    pub phase: String,
    pub model: Option<Model>,
    pub layers: Vec<Layer>,
    pub now: Option<Tick>,
    pub entry: Option<Entry>,
    pub experts: Experts,
    pub rates: Rates,
    /// Tokens a second and hits in percent, oldest first.
    pub history: VecDeque<(u64, u64)>,
    pub lines: VecDeque<String>,
    /// What was told last, and whether it covers the screen.
    pub told: Option<String>,
    pub help: bool,
    /// The chosen expert: layer and index.
    pub chosen: (usize, usize),
    samples: VecDeque<(f64, Totals)>,
    noted_s: f64,
}

impl View {
    pub(super) fn new(url: &str, has_key: bool) -> Self {
        Self {
            url: url.to_owned(),
            has_key,
            link: Link::Up,
            phase: "connecting".into(),
            model: None,
            layers: Vec::new(),
            now: None,
            entry: None,
            experts: Experts::default(),
            rates: Rates::default(),
            history: VecDeque::new(),
            lines: VecDeque::new(),
            told: None,
            help: false,
            chosen: (0, 0),
            samples: VecDeque::new(),
            noted_s: f64::NEG_INFINITY,
        }
    }

    /// Takes a message in.
    pub(super) fn take(&mut self, message: Message) {
        match message {
            Message::State(state) => self.state(*state),
            Message::Tick(tick) => self.tick(*tick),
            Message::Lost(why) => self.link = Link::Lost(why),
            Message::Told(text) => self.told = Some(text),
        }
    }

    fn state(&mut self, state: State) {
        self.link = Link::Up;
        self.phase = match &state.loading {
            Some(loading) => format!("{} {:.0}%", loading.step, loading.fraction * 100.0),
            None => state.phase,
        };
        self.model = state.model;
        self.layers = state.layers.unwrap_or_default();
        // Another server's totals and ticks are no continuation of these.
        self.entry = None;
        self.samples.clear();
        self.noted_s = f64::NEG_INFINITY;
        self.tick(state.now);
        self.choose(self.chosen);
    }

    fn tick(&mut self, mut tick: Tick) {
        self.link = Link::Up;
        if let Some(experts) = tick.experts.take() {
            self.experts = experts;
        }
        if let Some(entry) = tick.tick.take() {
            self.note(&entry);
            self.entry = Some(entry);
        }
        self.rate(tick.uptime_s, tick.totals);
        self.now = Some(tick);
    }

    fn rate(&mut self, uptime_s: f64, totals: Totals) {
        self.samples.push_back((uptime_s, totals));
        while self.samples.len() > MOST_SAMPLES
            || self
                .samples
                .get(1)
                .is_some_and(|(s, _)| uptime_s - s >= RATE_S)
        {
            self.samples.pop_front();
        }
        let Some((first_s, first)) = self.samples.front().copied() else {
            return;
        };
        let elapsed_s = uptime_s - first_s;
        if elapsed_s <= 0.0 {
            return;
        }
        #[expect(clippy::cast_precision_loss, reason = "for display")]
        let rise = |now: u64, before: u64| now.saturating_sub(before) as f64;
        let hits = rise(totals.hits, first.hits);
        let routed = hits + rise(totals.misses, first.misses);
        self.rates = Rates {
            tokens: rise(totals.decode_tokens, first.decode_tokens) / elapsed_s,
            hit_ratio: (routed > 0.0).then(|| hits / routed),
            read_bytes: rise(totals.fetch_bytes, first.fetch_bytes) / elapsed_s,
            stall: ((totals.stall_ms - first.stall_ms) / 1e3 / elapsed_s).clamp(0.0, 1.0),
        };
        self.remember(uptime_s);
    }

    /// A point of the history, once a second.
    fn remember(&mut self, uptime_s: f64) {
        if uptime_s - self.noted_s < 1.0 {
            return;
        }
        self.noted_s = uptime_s;
        if self.history.len() == MOST_POINTS {
            self.history.pop_front();
        }
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "rates are positive, and a cast saturates"
        )]
        let whole = |rate: f64| rate.round() as u64;
        let hits = self.rates.hit_ratio.unwrap_or(0.0) * 100.0;
        self.history
            .push_back((whole(self.rates.tokens * 10.0), whole(hits)));
    }

    /// Lines of the journal about what a tick changed.
    fn note(&mut self, entry: &Entry) {
        if self
            .entry
            .as_ref()
            .is_some_and(|last| last.t_s == entry.t_s)
        {
            return;
        }
        let mut lines = Vec::new();
        if entry.drift {
            lines.push("the topic changes: drift".to_owned());
        }
        if let Some(error) = &entry.lock_error {
            lines.push(format!("a lock failed: {error}"));
        }
        if let Some(lost) = entry.lost_bytes {
            let lost = crate::size::format_bytes(lost);
            lines.push(format!("the kernel took {lost} of transit"));
        }
        let bound = self.entry.as_ref().map(|last| last.binding);
        if bound.is_some_and(|bound| bound != entry.binding) {
            lines.push(format!("capacity is now set by {}", entry.binding.label()));
        }
        lines.extend(summary("pinned", &entry.pinned));
        lines.extend(summary("unpinned", &entry.unpinned));
        for line in lines {
            if self.lines.len() == MOST_LINES {
                self.lines.pop_front();
            }
            self.lines.push_back(format!("{:8.1} s  {line}", entry.t_s));
        }
    }

    /// Takes a key; what it asks for that is not the screen's own business.
    pub(super) fn key(&mut self, key: KeyEvent) -> Option<Order> {
        if key.kind == KeyEventKind::Release {
            return None;
        }
        let control = key.modifiers.contains(KeyModifiers::CONTROL);
        let covered = self.help || self.told.is_some();
        match key.code {
            KeyCode::Char('c') if control => return Some(Order::Quit),
            KeyCode::Esc | KeyCode::Enter if covered => self.uncover(),
            KeyCode::Char('q') | KeyCode::Esc => return Some(Order::Quit),
            _ if covered => self.uncover(),
            KeyCode::Char('?' | 'h') => self.help = true,
            KeyCode::Char('p') => return self.pause(),
            KeyCode::Enter | KeyCode::Char('e') => return self.explain(),
            code => self.walk(code),
        }
        None
    }

    fn uncover(&mut self) {
        self.help = false;
        self.told = None;
    }

    fn pause(&mut self) -> Option<Order> {
        if !self.has_key {
            self.told = Some(
                "pausing needs the server's API key: start the server and `hotpin top` with --api-key"
                    .into(),
            );
            return None;
        }
        let paused = self.now.as_ref().is_some_and(|now| now.paused);
        Some(Order::Pause(!paused))
    }

    fn explain(&self) -> Option<Order> {
        let (layer, expert) = self.chosen;
        (expert < self.layers.get(layer)?.experts).then_some(Order::Explain(layer, expert))
    }

    fn walk(&mut self, code: KeyCode) {
        let (layer, expert) = self.chosen;
        let to = match code {
            KeyCode::Up => (layer.saturating_sub(1), expert),
            KeyCode::Down => (layer.saturating_add(1), expert),
            KeyCode::Left => (layer, expert.saturating_sub(1)),
            KeyCode::Right => (layer, expert.saturating_add(1)),
            KeyCode::PageUp => (layer.saturating_sub(10), expert),
            KeyCode::PageDown => (layer.saturating_add(10), expert),
            KeyCode::Home => (layer, 0),
            KeyCode::End => (layer, usize::MAX),
            _ => return,
        };
        self.choose(to);
    }

    /// Chooses the nearest expert that there is.
    fn choose(&mut self, (layer, expert): (usize, usize)) {
        let layer = layer.min(self.layers.len().saturating_sub(1));
        let most = self.layers.get(layer).map_or(0, |layer| layer.experts);
        self.chosen = (layer, expert.min(most.saturating_sub(1)));
    }
}

/// Changes of one tick in words: one by name, many by number.
fn summary(what: &str, changes: &[Change]) -> Option<String> {
    let first = changes.first()?;
    let reason = serde_json::to_value(first.reason).ok()?;
    let reason = reason.as_str().unwrap_or_default();
    let place = format!("expert {} of layer {}", first.expert, first.layer);
    Some(match changes.len() {
        1 => format!("{what} {place}: {reason}"),
        many => format!("{what} {many} experts, {place} and others: {reason}"),
    })
}
