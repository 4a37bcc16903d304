//! The terminal: one thread hears of the server, one of the keys, and whatever comes is drawn.

use super::client::{Client, ClientError};
use super::draw::draw;
use super::view::{Message, Order, View};
use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

/// Wait before a server that has gone is sought again.
const AGAIN: Duration = Duration::from_secs(1);
/// Longest wait for a key before messages are looked for.
const GLANCE: Duration = Duration::from_millis(50);
/// Time between pictures on which nothing changed, so that a resized terminal is filled.
const REFRESH: Duration = Duration::from_secs(1);
/// Messages that wait to be drawn. A screen that falls behind makes the reader wait.
const WAITING: usize = 64;

/// Why the screen ended otherwise than by its user.
#[derive(Debug, thiserror::Error)]
pub enum ScreenError {
    /// The server, before anything was shown.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// The terminal.
    #[error("the terminal cannot be used: {0}")]
    Terminal(#[from] std::io::Error),
}

/// Shows a server until the user ends it. A server that goes away is waited for.
///
/// # Errors
/// [`ScreenError`]: no server answers at the start, or the terminal fails.
pub fn show(client: &Client) -> Result<(), ScreenError> {
    let state = client.state()?;
    let (tell, messages) = sync_channel(WAITING);
    let mut view = View::new(client.base(), client.has_key());
    view.take(Message::State(Box::new(state)));
    let (follower, teller) = (client.clone(), tell.clone());
    let known = view.model.is_some();
    thread::spawn(move || follow(&follower, &teller, known));
    let mut terminal = ratatui::try_init()?;
    let ended = run(&mut terminal, &mut view, client, &messages, &tell);
    ratatui::restore();
    Ok(ended?)
}

fn run(
    terminal: &mut DefaultTerminal,
    view: &mut View,
    client: &Client,
    messages: &Receiver<Message>,
    tell: &SyncSender<Message>,
) -> std::io::Result<()> {
    let mut drawn: Option<Instant> = None;
    loop {
        let mut changed = drawn.is_none_or(|at| at.elapsed() >= REFRESH);
        while let Ok(message) = messages.try_recv() {
            view.take(message);
            changed = true;
        }
        if changed {
            terminal.draw(|frame| draw(frame, view))?;
            drawn = Some(Instant::now());
        }
        if !event::poll(GLANCE)? {
            continue;
        }
        let order = match event::read()? {
            Event::Key(key) => view.key(key),
            _ => None,
        };
        drawn = None;
        match order {
            Some(Order::Quit) => return Ok(()),
            Some(order) => carry_out(order, client.clone(), tell.clone()),
            None => {}
        }
    }
}

/// Asks the server on a thread of its own, so that a slow answer holds nothing up.
fn carry_out(order: Order, client: Client, tell: SyncSender<Message>) {
    thread::spawn(move || {
        let told = match order {
            Order::Quit => return,
            Order::Pause(paused) => {
                let path = if paused { "pause" } else { "resume" };
                client
                    .order(&format!("/api/control/{path}"))
                    .map(|_| String::new())
            }
            Order::Explain(layer, expert) => explain(&client, layer, expert),
        };
        let text = told.unwrap_or_else(|error| error.to_string());
        if !text.is_empty() {
            // Without a screen nobody wants to know.
            let _ = tell.send(Message::Told(text));
        }
    });
}

fn explain(client: &Client, layer: usize, expert: usize) -> Result<String, ClientError> {
    let path = format!("/api/explain/{layer}/{expert}");
    let answer: serde_json::Value = client.get(&path)?;
    Ok(answer["text"].as_str().unwrap_or_default().to_owned())
}

/// Hears of the server as long as somebody listens; `known` is whether its model is.
fn follow(client: &Client, tell: &SyncSender<Message>, mut known: bool) {
    loop {
        let ended = client.follow(&mut |tick| {
            if !known && let Ok(state) = client.state() {
                known = state.model.is_some();
                if tell.send(Message::State(Box::new(state))).is_err() {
                    return false;
                }
            }
            tell.send(Message::Tick(Box::new(tick))).is_ok()
        });
        let Err(error) = ended else { return };
        if tell.send(Message::Lost(error.to_string())).is_err() {
            return;
        }
        loop {
            thread::sleep(AGAIN);
            match client.state() {
                Ok(state) => {
                    known = state.model.is_some();
                    if tell.send(Message::State(Box::new(state))).is_err() {
                        return;
                    }
                    break;
                }
                Err(error) => {
                    if tell.send(Message::Lost(error.to_string())).is_err() {
                        return;
                    }
                }
            }
        }
    }
}
