//! What operators and observers ask.

use super::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn malformed_requests_of_operators_and_observers_change_nothing() {
    let Rig { node, mut client, ann, before, _folder, .. } = rig().await;
    let grant = ann.assigned(0).unwrap();
    let mut cases = Vec::new();
    let context = |change: &dyn Fn(&mut v1::OperatorContext)| {
        let mut context = operator("test").unwrap();
        change(&mut context);
        Some(context)
    };
    let contexts: Vec<(&str, Option<v1::OperatorContext>)> = vec![
        ("no context", None),
        ("no reason", context(&|c| c.reason.clear())),
        ("blank reason", context(&|c| c.reason = "  ".into())),
        ("long reason", context(&|c| c.reason = "x".repeat(1_025))),
        ("no actor", context(&|c| c.actor.clear())),
        ("long actor", context(&|c| c.actor = long())),
        ("odd request id", context(&|c| c.request_id = "a b".into())),
    ];
    for (what, context) in contexts {
        let wish = v1::DrainRequest {
            context: context.clone(),
            group: GROUP.to_owned(),
            member: "ann".to_owned(),
            undrain: false,
        };
        cases.push(refused(what, "INVALID_ARGUMENT", client.operator.drain(wish).await));
        let wish = v1::RebalanceRequest { context: context.clone(), group: GROUP.to_owned() };
        cases.push(refused(what, "INVALID_ARGUMENT", client.operator.rebalance(wish).await));
        let wish = v1::MoveRequest {
            context,
            group: GROUP.to_owned(),
            partition: Some(partition(0)),
            to_member: "ann".to_owned(),
        };
        cases.push(refused(what, "INVALID_ARGUMENT", client.operator.r#move(wish).await));
    }
    let wish = |group: &str, partition, to: &str| v1::MoveRequest {
        context: operator("test"),
        group: group.to_owned(),
        partition,
        to_member: to.to_owned(),
    };
    for (what, code, wish) in [
        ("move in no group", "UNKNOWN_GROUP", wish("no", Some(partition(0)), "ann")),
        ("move nothing", "INVALID_ARGUMENT", wish(GROUP, None, "ann")),
        ("move unknown", "UNKNOWN_PARTITION", wish(GROUP, Some(partition(8)), "ann")),
        ("move to nobody", "INVALID_ARGUMENT", wish(GROUP, Some(partition(0)), "")),
        ("move to a stranger", "UNKNOWN_MEMBER", wish(GROUP, Some(partition(0)), "bob")),
        ("move to the owner", "NOTHING_TO_DO", wish(GROUP, Some(partition(0)), "ann")),
        ("move, 10 MB", "TOO_LARGE", wish(&huge(), None, "ann")),
    ] {
        cases.push(refused(what, code, client.operator.r#move(wish).await));
    }
    let drain = |member: &str, undrain| v1::DrainRequest {
        context: operator("test"),
        group: GROUP.to_owned(),
        member: member.to_owned(),
        undrain,
    };
    cases.push(refused(
        "drain a stranger",
        "UNKNOWN_MEMBER",
        client.operator.drain(drain("x", false)).await,
    ));
    cases.push(refused(
        "undrain",
        "NOTHING_TO_DO",
        client.operator.drain(drain("ann", true)).await,
    ));
    let wish = v1::RebalanceRequest { context: operator("test"), group: "no".to_owned() };
    cases.push(refused(
        "rebalance no group",
        "UNKNOWN_GROUP",
        client.operator.rebalance(wish).await,
    ));

    let raise = |floor| v1::RaiseEpochFloorRequest { context: operator("test"), floor };
    for (what, floor) in
        [("floor 0", 0), ("floor overflow", u64::MAX), ("floor too far", (1 << 40) + 1_000_000)]
    {
        let answer = client.operator.raise_epoch_floor(raise(floor)).await;
        cases.push(refused(what, "INVALID_ARGUMENT", answer));
    }
    let nameless = v1::RaiseEpochFloorRequest { context: None, floor: 7 };
    cases.push(refused(
        "floor without a reason",
        "INVALID_ARGUMENT",
        client.operator.raise_epoch_floor(nameless).await,
    ));

    let verify = |group: &str, member: &str, grants| v1::VerifyRequest {
        group: group.to_owned(),
        member: member.to_owned(),
        grants,
    };
    let one = v1::GrantRef { partition: grant.partition.clone(), epoch: grant.epoch };
    let zero = v1::GrantRef { epoch: 0, ..one.clone() };
    for (what, code, request) in [
        ("verify nothing", "INVALID_ARGUMENT", v1::VerifyRequest::default()),
        ("verify no grants", "INVALID_ARGUMENT", verify(GROUP, "ann", vec![])),
        ("verify epoch 0", "INVALID_ARGUMENT", verify(GROUP, "ann", vec![zero])),
        ("verify twice", "INVALID_ARGUMENT", verify(GROUP, "ann", vec![one.clone(), one.clone()])),
        ("verify no group", "UNKNOWN_GROUP", verify("no", "ann", vec![one.clone()])),
        ("verify, many", "TOO_LARGE", verify(GROUP, "ann", vec![one.clone(); 10_001])),
        ("verify, 10 MB", "TOO_LARGE", verify(GROUP, &huge(), vec![one.clone()])),
    ] {
        cases.push(refused(what, code, client.ownership.verify(request).await));
    }
    for (what, code, group) in [
        ("describe nothing", "INVALID_ARGUMENT", String::new()),
        ("describe odd", "INVALID_ARGUMENT", "a\nb".to_owned()),
        ("describe long", "INVALID_ARGUMENT", long()),
        ("describe unknown", "UNKNOWN_GROUP", "no".to_owned()),
        ("describe 10 MB", "TOO_LARGE", huge()),
    ] {
        let request = v1::DescribeGroupRequest { group };
        cases.push(refused(what, code, client.ownership.describe_group(request).await));
    }
    check(cases);
    let stranger = client.ownership.verify(verify(GROUP, "bob", vec![one])).await.unwrap();
    assert_eq!(stranger.into_inner().verdicts[0].error.as_ref().unwrap().code, "NOT_OWNED");
    assert_eq!(digest(&node), before);
    node.shutdown().await;
}
