-- The id that makes this installation's job keys unlike every other one's.
SELECT id FROM fanout.installation
