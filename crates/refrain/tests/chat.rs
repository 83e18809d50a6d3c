//! Conversations: history, roles, and a context that fills up.

use refrain::{Builtin, Chat, ChatOptions, ChatReply, Device, Error, Finish, Generate, Message, Model};
use refrain::{OnFull, Prompt, RenderOptions, Role, SamplingParams, Session, SessionOptions};

fn session(context: usize) -> Session {
    let device = Device::Cpu { threads: Some(2) };
    let options = SessionOptions { device, context: Some(context), ..SessionOptions::default() };
    Session::new(&Builtin::Chat.open().unwrap(), &options).unwrap()
}

fn chat(context: usize, on_full: OnFull) -> Chat {
    Chat::new(session(context), ChatOptions { on_full, ..ChatOptions::default() }).unwrap()
}

fn greedy(max_tokens: usize) -> Generate {
    Generate { sampling: Some(SamplingParams::greedy()), max_tokens: Some(max_tokens), ..Generate::default() }
}

fn text(reply: &mut ChatReply<'_>) -> String {
    reply.map(|delta| delta.unwrap().text).collect()
}

#[test]
fn default_render_options_ask_the_model_to_answer() {
    let model = Builtin::Chat.open().unwrap();
    let messages = [Message::new(Role::User, "Hello!")];
    let prompt = model.render(&messages, &RenderOptions::default()).unwrap();
    let without = RenderOptions { add_generation_prompt: false, ..RenderOptions::default() };
    assert!(prompt.len() > model.render(&messages, &without).unwrap().len(), "{prompt}");
}

#[test]
fn a_chat_keeps_its_history_and_evaluates_only_what_is_new() {
    let mut chat = chat(256, OnFull::Shift);
    chat.restart(Some("You are kind."));
    let mut reply = chat.send("Hello!", &greedy(12)).unwrap();
    let first = text(&mut reply);
    drop(reply);
    let roles: Vec<_> = chat.messages().iter().map(Role::of).collect();
    assert_eq!(roles, [Some(Role::System), Some(Role::User), Some(Role::Assistant)]);
    assert_eq!(chat.messages()[2].content, first);

    let mut reply = chat.send("What is your name?", &greedy(12)).unwrap();
    let second = text(&mut reply);
    let summary = reply.summary().clone();
    drop(reply);
    assert!(summary.n_evaluated < summary.n_prompt / 2, "{summary:?}");
    // A session that evaluates the whole conversation gives the same reply.
    let messages = &chat.messages()[..4];
    let mut alone = session(256);
    let alone = alone.generate(Prompt::Chat(messages, &RenderOptions::default()), &greedy(12)).unwrap();
    assert_eq!(second, alone.map(|delta| delta.unwrap().text).collect::<String>());
}

#[test]
fn a_message_that_gets_no_reply_leaves_no_trace() {
    let mut chat = chat(64, OnFull::Stop);
    drop(chat.send("Hello!", &greedy(4)).unwrap());
    assert_eq!(chat.messages(), [], "the history stays empty");
    let refused = chat.send("cat ".repeat(200), &greedy(4)).err().unwrap();
    assert!(matches!(refused, Error::PromptTooLong { context: 64, .. }), "{refused}");
    assert_eq!(chat.messages(), []);
    let stories = Session::new(&Model::builtin().unwrap(), &SessionOptions::default()).unwrap();
    assert!(matches!(Chat::new(stories, ChatOptions::default()), Err(Error::NoChatTemplate { .. })));
}

#[test]
fn a_full_context_drops_the_oldest_turns_and_keeps_the_system_prompt() {
    let mut chat = chat(96, OnFull::Shift);
    chat.restart(Some("You are kind."));
    for turn in 0..8 {
        let mut reply = chat.send(format!("Tell me about the number {turn}."), &greedy(16)).unwrap();
        let prompt = reply.prompt().to_owned();
        text(&mut reply);
        assert!(reply.summary().n_prompt <= 96, "turn {turn}");
        assert!(prompt.contains("You are kind.") && prompt.contains(&format!("number {turn}")), "{prompt}");
        drop(reply);
        if turn == 7 {
            assert!(!prompt.contains("number 0"), "{prompt}");
        }
    }
    assert!(chat.n_dropped() >= 2 && chat.n_dropped().is_multiple_of(2), "{}", chat.n_dropped());
    assert_eq!(chat.messages().len(), 17, "the history is complete");
}

#[test]
fn a_reply_that_fills_the_context_continues_after_a_shift() {
    let long = |on_full| {
        let mut chat = chat(96, on_full);
        let ends = chat.session().model().tokenizer().end_of_generation().to_vec();
        let logit_bias = ends.into_iter().map(|end| (end, f32::NEG_INFINITY)).collect();
        let sampling = SamplingParams { logit_bias, ..SamplingParams::greedy() };
        let options = Generate { sampling: Some(sampling), ..greedy(50) };
        for question in ["Hello!", "What is a cat?"] {
            let mut reply = chat.send(question, &options).unwrap();
            let said = text(&mut reply);
            if question != "Hello!" {
                let summary = reply.summary().clone();
                drop(reply);
                return (said, summary, chat.n_dropped());
            }
        }
        unreachable!("there are two questions")
    };
    let (stopped, summary, n_dropped) = long(OnFull::Stop);
    assert_eq!((summary.finish, n_dropped), (Some(Finish::ContextFull), 0));
    assert!(summary.n_generated < 50, "{summary:?}");
    let (shifted, summary, n_dropped) = long(OnFull::Shift);
    assert_eq!((summary.finish, summary.n_generated), (Some(Finish::MaxTokens), 50));
    assert_eq!(n_dropped, 2);
    assert!(shifted.starts_with(&stopped) && shifted.len() > stopped.len(), "{stopped:?} {shifted:?}");
}
