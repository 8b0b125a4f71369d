-- What is wrong and not open as an incident, and incidents whose trouble is over: nothing, as a rule. Parameters: see trouble.
WITH RECURSIVE
-- include trouble
SELECT 'new' AS what, t.kind, t.subject
  FROM trouble t
 WHERE t.is_firm AND NOT EXISTS (SELECT 1 FROM fanout.incident i WHERE i.kind = t.kind AND i.subject = t.subject AND i.closed_at IS NULL)
 UNION
SELECT 'over', i.kind, i.subject
  FROM fanout.incident i
 WHERE i.closed_at IS NULL AND NOT EXISTS (SELECT 1 FROM trouble t WHERE t.kind = i.kind AND t.subject = i.subject)
